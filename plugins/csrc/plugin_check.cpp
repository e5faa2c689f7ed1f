#include "plugin_check.h"

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

bool isKnownAndNot(nvinfer1::IDimensionExpr const* size, int64_t expected) {
    return size->isConstant() && size->getConstantValue() != expected;
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

std::string problemOfShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs) {
    if (nbInputs != kInputs) {
        return "Expected 4 inputs, found " + std::to_string(nbInputs) + kAdvice;
    }
    for (int32_t i = 0; i < kInputs; ++i) {
        if (inputs[i].nbDims != 2) {
            return std::string(kInputNames[i]) + ": expected 2 dimensions, found " + std::to_string(inputs[i].nbDims) + kAdvice;
        }
    }
    nvinfer1::DimsExprs const& codebook = inputs[kInputs - 1];
    if (!codebook.d[0]->isConstant() || !codebook.d[1]->isConstant()) {
        return std::string("codebook: expected sizes that the network fixes, found dynamic ones") + kAdvice;
    }
    const int64_t vocab = codebook.d[0]->getConstantValue();
    const int64_t rank = codebook.d[1]->getConstantValue();
    const std::string sizes = "[" + std::to_string(vocab) + ", " + std::to_string(rank) + "]";
    if (vocab < 1 || vocab > kMaxVocab || rank < 1 || rank > kMaxRank) {
        return "codebook: expected 1 to " + std::to_string(kMaxVocab) + " rows of 1 to " + std::to_string(kMaxRank) + " columns, found " +
               sizes + ". Use the built-in operators instead of the plugin.";
    }
    if (isKnownAndNot(inputs[0].d[1], vocab) || isKnownAndNot(inputs[1].d[1], rank) || isKnownAndNot(inputs[2].d[1], rank)) {
        return "Expected base_logits [B, V], hidden_projection [B, R] and state_projection [B, R] of a codebook [V, R], found other sizes "
               "beside a codebook of " +
               sizes + kAdvice;
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
