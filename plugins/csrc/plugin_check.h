// What the plugin refuses, in words: expected, found, what to do.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace domino {

// Empty if the plugin takes these input types, else why not.
std::string problemOfTypes(nvinfer1::DataType const* inputTypes, int32_t nbInputs);

// Empty if the plugin takes these input sizes, else why not.  Only sizes that are known when a network is made are looked at.
std::string problemOfShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs);

// Tells TensorRT's logger, if it gave one to the library, else standard error.
void logError(std::string const& message);

// Where `logError` finds the logger; nullptr for none.
void setLoggerFinderOfPlugin(nvinfer1::ILoggerFinder* finder);

}  // namespace domino
