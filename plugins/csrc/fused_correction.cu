#include "fused_correction.h"

#include "correction_kernels.cuh"

namespace domino {
namespace {

static_assert(kMaxVocab == 65535 * kTileRows, "the header counts in other tiles than the kernels");
static_assert(tileSharedBytes(kMaxRank) <= 48 * 1024, "a bottleneck of the largest rank does not fit into shared memory");

int64_t tileCount(int64_t vocab) {
    return (vocab + kTileRows - 1) / kTileRows;
}

template <typename Weight, int kVector>
void launchTiles(const FusedCorrection& correction, float* tileValues, int32_t* tileIds, cudaStream_t stream) {
    const dim3 grid(correction.batch, tileCount(correction.vocab));
    correctionTiles<Weight, kVector><<<grid, kTileThreads, tileSharedBytes(correction.rank), stream>>>(
        correction.baseLogits, correction.hiddenProjection, correction.stateProjection, static_cast<const Weight*>(correction.codebook),
        correction.vocab, correction.rank, tileValues, tileIds);
}

// Sixteen bytes of a codebook row at a time where the rank allows it.
template <typename Weight>
void launchTiles(const FusedCorrection& correction, float* tileValues, int32_t* tileIds, cudaStream_t stream) {
    constexpr int kVector = 16 / sizeof(Weight);
    if (correction.rank % kVector == 0) {
        launchTiles<Weight, kVector>(correction, tileValues, tileIds, stream);
    } else {
        launchTiles<Weight, 1>(correction, tileValues, tileIds, stream);
    }
}

}  // namespace

size_t workspaceBytes(int64_t batch, int64_t vocab) {
    return static_cast<size_t>(batch * tileCount(vocab)) * (sizeof(float) + sizeof(int32_t));
}

cudaError_t launch(const FusedCorrection& correction, cudaStream_t stream) {
    if (correction.batch == 0) {
        return cudaSuccess;  // an empty grid is an error of CUDA's
    }
    const int32_t tiles = tileCount(correction.vocab);
    auto* tileValues = static_cast<float*>(correction.workspace);
    auto* tileIds = reinterpret_cast<int32_t*>(tileValues + static_cast<int64_t>(correction.batch) * tiles);
    switch (correction.weightType) {
        case WeightType::kFloat32: launchTiles<float>(correction, tileValues, tileIds, stream); break;
        case WeightType::kFloat16: launchTiles<__half>(correction, tileValues, tileIds, stream); break;
        case WeightType::kBfloat16: launchTiles<__nv_bfloat16>(correction, tileValues, tileIds, stream); break;
    }
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        return status;
    }
    reduceTiles<<<correction.batch, kReduceThreads, sizeof(Candidate) * (kReduceThreads / kWarpSize), stream>>>(
        tileValues, tileIds, tiles, correction.tokenIds, correction.correctedLogits);
    return cudaGetLastError();
}

}  // namespace domino
