// The fused logit correction as one asynchronous call, without anything of TensorRT.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace domino {

enum class WeightType { kFloat32, kFloat16, kBfloat16 };

// Shape legend: B batch, V vocabulary, R rank.  All pointers are device memory, contiguous and aligned to 16 bytes.
struct FusedCorrection {
    int32_t batch;
    int32_t vocab;
    int32_t rank;
    WeightType weightType;
    const float* baseLogits;        // [B, V]
    const float* hiddenProjection;  // z [B, R]
    const float* stateProjection;   // s [B, R]
    const void* codebook;           // W2 [V, R], of weightType
    void* workspace;                // workspaceBytes(batch, vocab)
    int64_t* tokenIds;              // [B]
    float* correctedLogits;         // [B]
};

// The bottleneck of a row lies in shared memory, of which a kernel has 48 KiB without asking for more; 256 bytes are left for the rest.
constexpr int32_t kMaxRank = 12 * 1024 - 64;
// Tiles of 128 rows lie along the grid's second dimension, which is limited to 65535 blocks.
constexpr int32_t kMaxVocab = 65535 * 128;

// Bytes of device memory for what the first kernel leaves to the second.
size_t workspaceBytes(int64_t batch, int64_t vocab);

// Launches the two kernels on `stream`; nothing is allocated and nothing is waited for, so a CUDA graph can capture it.
cudaError_t launch(const FusedCorrection& correction, cudaStream_t stream);

}  // namespace domino
