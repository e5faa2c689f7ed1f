/* libnvinfer for `import tensorrt` without TensorRT: linked against the lean runtime, which has all but a builder. */
#include <stddef.h>
#include <stdint.h>

void *getPluginRegistry(void); /* the lean runtime's */

void *createInferBuilder_INTERNAL(void *logger, int32_t version) {
    (void)logger;
    (void)version;
    return NULL;
}

void *getBuilderPluginRegistry(int32_t capability) {
    (void)capability;
    return getPluginRegistry();
}
