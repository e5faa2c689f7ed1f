// Leads the plugin of a library through the calls that TensorRT makes when it opens and runs an engine; without TensorRT and without a
// GPU.  Argument: the library.  Prints one line per answer, `name value`.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <algorithm>
#include <iostream>
#include <vector>

using namespace nvinfer1;

namespace {

PluginTensorDesc described(DataType type, std::vector<int64_t> const& sizes) {
    PluginTensorDesc tensor{};
    tensor.type = type;
    tensor.dims.nbDims = static_cast<int32_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), tensor.dims.d);
    return tensor;
}

// Of an engine whose batch may be as large.
std::vector<DynamicPluginTensorDesc> ranges(std::vector<PluginTensorDesc> const& tensors, int64_t largestBatch) {
    std::vector<DynamicPluginTensorDesc> found;
    for (PluginTensorDesc const& tensor : tensors) {
        found.push_back({tensor, tensor.dims, tensor.dims, tensor.dims});
    }
    found[0].max.d[0] = largestBatch;
    return found;
}

// Four inputs and two outputs.
std::vector<PluginTensorDesc> tensors(int64_t batch, int64_t baseColumns = 300, int64_t stateRows = -1) {
    return {described(DataType::kFLOAT, {batch, baseColumns}),
            described(DataType::kFLOAT, {batch, 16}),
            described(DataType::kFLOAT, {stateRows < 0 ? batch : stateRows, 16}),
            described(DataType::kHALF, {300, 16}),
            described(DataType::kINT64, {batch}),
            described(DataType::kFLOAT, {batch})};
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::cerr << dlerror() << "\n";
        return 1;
    }
    auto getCreators = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
    int32_t count = 0;
    auto* creator = static_cast<IPluginCreatorV3One*>(getCreators(count)[0]);
    std::cout << "creators " << count << "\n";
    std::cout << "identity " << creator->getPluginNamespace() << "::" << creator->getPluginName() << " " << creator->getPluginVersion() << "\n";

    // As from an engine that was built with the Python form: its kernels come along.
    const PluginField kernels{"kernels", "{}", PluginFieldType::kCHAR, 2};
    const PluginFieldCollection fields{1, &kernels};
    IPluginV3* opened = creator->createPlugin("node", &fields, TensorRTPhase::kRUNTIME);
    auto* runtime = static_cast<IPluginV3OneRuntime*>(opened->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    IPluginV3* attached = runtime->attachToContext(nullptr);
    std::cout << "own_copy " << (attached != nullptr && attached != opened) << "\n";
    delete opened;

    auto* build = static_cast<IPluginV3OneBuild*>(attached->getCapabilityInterface(PluginCapabilityType::kBUILD));
    runtime = static_cast<IPluginV3OneRuntime*>(attached->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    std::cout << "serialised_fields " << runtime->getFieldsToSerialize()->nbFields << "\n";
    const std::vector<PluginTensorDesc> two = tensors(2), none = tensors(0);
    const std::vector<DynamicPluginTensorDesc> known = ranges(two, 8);
    std::cout << "workspace " << build->getWorkspaceSize(known.data(), 4, known.data() + 4, 2) << "\n";
    for (int32_t place = 0; place < 6; ++place) {
        std::cout << "takes_" << place;
        for (DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT32, DataType::kINT64}) {
            std::vector<DynamicPluginTensorDesc> tried = known;
            tried[place].desc.type = type;
            std::cout << (build->supportsFormatCombination(place, tried.data(), 4, 2) ? " 1" : " 0");
        }
        std::cout << "\n";
    }

    DataType types[] = {DataType::kFLOAT, DataType::kFLOAT, DataType::kFLOAT, DataType::kBF16}, outputTypes[2];
    std::cout << "takes_types " << build->getOutputDataTypes(outputTypes, 2, types, 4) << "\n";
    types[0] = DataType::kHALF;
    types[3] = DataType::kINT32;
    std::cout << "other_types " << build->getOutputDataTypes(outputTypes, 2, types, 4) << "\n";
    std::cout << "takes_shapes " << runtime->onShapeChange(two.data(), 4, two.data() + 4, 2) << "\n";
    const std::vector<PluginTensorDesc> wide = tensors(2, 301), uneven = tensors(2, 300, 3);
    std::cout << "other_columns " << runtime->onShapeChange(wide.data(), 4, wide.data() + 4, 2) << "\n";
    std::cout << "other_rows " << runtime->onShapeChange(uneven.data(), 4, uneven.data() + 4, 2) << "\n";
    void const* const inputs[4] = {};
    void* const outputs[2] = {};
    std::cout << "runs_empty " << runtime->enqueue(none.data(), none.data() + 4, inputs, outputs, nullptr, nullptr) << "\n";
    // Without a driver nothing starts; with one, null addresses must not be read.
    if (dlopen("libcuda.so.1", RTLD_NOW) == nullptr) {
        std::cout << "runs " << runtime->enqueue(two.data(), two.data() + 4, inputs, outputs, nullptr, nullptr) << "\n";
    }
    delete attached;
    return 0;
}
