#include "fused_correction.h"

#include "correction_kernels.cuh"

namespace domino {
namespace {

int64_t tileCount(int64_t vocab) {
    return (vocab + kTileRows - 1) / kTileRows;
}

template <typename Weight, int kVector>
void launchTiles(const FusedCorrection& c, float* tileValues, int32_t* tileIds, cudaStream_t stream) {
    const dim3 grid(c.batch, tileCount(c.vocab));
    correctionTiles<Weight, kVector><<<grid, kTileThreads, tileSharedBytes(c.rank), stream>>>(
        c.baseLogits, c.hiddenProjection, c.stateProjection, static_cast<const Weight*>(c.codebook), c.vocab, c.rank, tileValues, tileIds);
}

// Sixteen bytes of a codebook row at a time where the rank allows it.
template <typename Weight>
void launchTiles(const FusedCorrection& c, float* tileValues, int32_t* tileIds, cudaStream_t stream) {
    constexpr int kVector = 16 / sizeof(Weight);
    if (c.rank % kVector == 0) {
        launchTiles<Weight, kVector>(c, tileValues, tileIds, stream);
    } else {
        launchTiles<Weight, 1>(c, tileValues, tileIds, stream);
    }
}

}  // namespace

size_t workspaceBytes(int64_t batch, int64_t vocab) {
    return static_cast<size_t>(batch * tileCount(vocab)) * (sizeof(float) + sizeof(int32_t));
}

cudaError_t launch(const FusedCorrection& c, cudaStream_t stream) {
    if (c.batch == 0) {
        return cudaSuccess;  // an empty grid is an error of CUDA's
    }
    const int32_t tiles = tileCount(c.vocab);
    auto* tileValues = static_cast<float*>(c.workspace);
    auto* tileIds = reinterpret_cast<int32_t*>(tileValues + static_cast<int64_t>(c.batch) * tiles);
    switch (c.weightType) {
        case WeightType::kFloat32: launchTiles<float>(c, tileValues, tileIds, stream); break;
        case WeightType::kFloat16: launchTiles<__half>(c, tileValues, tileIds, stream); break;
        case WeightType::kBfloat16: launchTiles<__nv_bfloat16>(c, tileValues, tileIds, stream); break;
    }
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        return status;
    }
    reduceTiles<<<c.batch, kReduceThreads, sizeof(Candidate) * (kReduceThreads / kWarpSize), stream>>>(
        tileValues, tileIds, tiles, c.tokenIds, c.correctedLogits);
    return cudaGetLastError();
}

}  // namespace domino
