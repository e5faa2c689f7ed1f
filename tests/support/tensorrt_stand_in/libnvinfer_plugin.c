/* libnvinfer_plugin for `import tensorrt` without TensorRT: no plugins of NVIDIA's. */
#include <stdbool.h>

bool initLibNvInferPlugins(void *logger, const char *plugin_namespace) {
    (void)logger;
    (void)plugin_namespace;
    return true;
}
