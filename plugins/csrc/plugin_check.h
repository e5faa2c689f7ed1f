// What the plugin refuses, in words: expected, found, what to do.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace domino {

// Empty if the plugin takes these input types, else why not.
std::string problemOfTypes(nvinfer1::DataType const* inputTypes, int32_t nbInputs);

// Stands for a size that is not known before the engine runs.
constexpr int64_t kUnknown = -1;

using Shape = std::vector<int64_t>;

// The shape of one input of a network that is being built, and of one that is about to run.
Shape shapeOf(nvinfer1::DimsExprs const& input);
Shape shapeOf(nvinfer1::PluginTensorDesc const& input);

// Empty if the plugin takes inputs of these shapes, else why not.  The codebook's sizes must be known; others are compared if they are.
std::string problemOfShapes(std::vector<Shape> const& inputs);

// Tells TensorRT's logger, if it gave one to the library, else standard error.
void logError(std::string const& message);

// Where `logError` finds the logger; nullptr for none.
void setLoggerFinderOfPlugin(nvinfer1::ILoggerFinder* finder);

}  // namespace domino
