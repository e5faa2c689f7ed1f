#include "plugin_check.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>

#include "fused_correction.h"

namespace domino {
namespace {

using nvinfer1::DataType;

constexpr int32_t kInputs = 4;
constexpr std::array<char const*, kInputs> kInputNames = {"base_logits", "hidden_projection", "state_projection", "codebook"};
constexpr char const* kAdvice = ". Build from a head that domino-deploy exported.";

std::atomic<nvinfer1::ILoggerFinder*> loggerFinder{nullptr};

std::string nameOf(DataType type) {
    switch (type) {
        case DataType::kFLOAT: return "float32";
        case DataType::kHALF: return "float16";
        case DataType::kBF16: return "bfloat16";
        case DataType::kINT32: return "int32";
        case DataType::kINT64: return "int64";
        default: return "TensorRT's type number " + std::to_string(static_cast<int32_t>(type));
    }
}

std::string shown(Shape const& shape) {
    std::string text;
    for (int64_t size : shape) {
        text += (text.empty() ? "" : ", ") + (size == kUnknown ? "?" : std::to_string(size));
    }
    return "[" + text + "]";
}

bool areEqualWhereKnown(Shape const& left, Shape const& right) {
    return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                      [](int64_t a, int64_t b) { return a == kUnknown || b == kUnknown || a == b; });
}

}  // namespace

std::string problemOfTypes(DataType const* inputTypes, int32_t nbInputs) {
    if (nbInputs != kInputs) {
        return "Expected 4 inputs, found " + std::to_string(nbInputs) + kAdvice;
    }
    std::string problems;
    for (int32_t i = 0; i < kInputs; ++i) {
        const bool isCodebook = i == kInputs - 1;
        const bool isTaken = inputTypes[i] == DataType::kFLOAT ||
                             (isCodebook && (inputTypes[i] == DataType::kHALF || inputTypes[i] == DataType::kBF16));
        if (!isTaken) {
            problems += std::string(problems.empty() ? "" : "; ") + kInputNames[i] + ": expected " +
                        (isCodebook ? "float32, float16 or bfloat16" : "float32") + ", found " + nameOf(inputTypes[i]);
        }
    }
    return problems.empty() ? problems : problems + kAdvice;
}

Shape shapeOf(nvinfer1::DimsExprs const& input) {
    Shape shape;
    for (int32_t i = 0; i < input.nbDims; ++i) {
        shape.push_back(input.d[i]->isConstant() ? input.d[i]->getConstantValue() : kUnknown);
    }
    return shape;
}

Shape shapeOf(nvinfer1::PluginTensorDesc const& input) {
    return Shape(input.dims.d, input.dims.d + input.dims.nbDims);
}

std::string problemOfShapes(std::vector<Shape> const& inputs) {
    if (inputs.size() != kInputs) {
        return "Expected 4 inputs, found " + std::to_string(inputs.size()) + kAdvice;
    }
    for (int32_t i = 0; i < kInputs; ++i) {
        if (inputs[i].size() != 2) {
            return std::string(kInputNames[i]) + ": expected 2 dimensions, found " + std::to_string(inputs[i].size()) + kAdvice;
        }
    }
    Shape const& codebook = inputs[kInputs - 1];
    const int64_t vocab = codebook[0];
    const int64_t rank = codebook[1];
    if (vocab == kUnknown || rank == kUnknown) {
        return "codebook: expected a fixed number of rows and columns, found " + shown(codebook) + kAdvice;
    }
    if (vocab < 1 || vocab > kMaxVocab || rank < 1 || rank > kMaxRank) {
        return "codebook: expected 1 to " + std::to_string(kMaxVocab) + " rows of 1 to " + std::to_string(kMaxRank) + " columns, found " +
               shown(codebook) + ". Use the built-in operators instead of the plugin.";
    }
    const int64_t rows = inputs[0][0];
    const std::array<Shape, kInputs - 1> expected = {Shape{rows, vocab}, Shape{rows, rank}, Shape{rows, rank}};
    for (size_t i = 0; i < expected.size(); ++i) {
        if (!areEqualWhereKnown(inputs[i], expected[i])) {
            return std::string(kInputNames[i]) + ": expected " + shown(expected[i]) + " beside a codebook of " + shown(codebook) +
                   ", found " + shown(inputs[i]) + kAdvice;
        }
    }
    return "";
}

void logError(std::string const& message) {
    const std::string text = std::string(DOMINO_DOMAIN "::" DOMINO_NAME ": ") + message;
    nvinfer1::ILoggerFinder* finder = loggerFinder;
    nvinfer1::ILogger* logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger != nullptr) {
        logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
    } else {
        std::fprintf(stderr, "%s\n", text.c_str());
    }
}

void setLoggerFinderOfPlugin(nvinfer1::ILoggerFinder* finder) {
    loggerFinder = finder;
}

}  // namespace domino
