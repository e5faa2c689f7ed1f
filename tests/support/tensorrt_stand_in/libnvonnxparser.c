/* libnvonnxparser for `import tensorrt` without TensorRT: no parser. */
#include <stddef.h>
#include <stdint.h>

void *createNvOnnxParser_INTERNAL(void *network, void *logger, int version) {
    (void)network;
    (void)logger;
    (void)version;
    return NULL;
}

void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *logger, int32_t version) {
    (void)refitter;
    (void)logger;
    (void)version;
    return NULL;
}

int getNvOnnxParserVersion(void) {
    return 0;
}
