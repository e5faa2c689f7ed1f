// Device code of the fused logit correction: the best token of every tile of the vocabulary, then the best of the tiles.
//
// base + W2 SiLU(z + s) (Domino, arXiv 2605.29707, section 5) in fp32, as plugins/reference.py computes it; the corrected logits
// themselves are never written to memory.
//
// Shape legend: B batch, V vocabulary, R rank, T tiles of kTileRows vocabulary rows.
#pragma once

#include "candidate.cuh"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace domino {

constexpr int kWarpSize = 32;
constexpr int kTileThreads = 128;
constexpr int kTileRows = 128;
constexpr int kReduceThreads = 1024;
// Codebook rows that a warp reads at a time: their loads overlap, and they share what is read of the bottleneck.
constexpr int kRowsAtOnce = 4;
constexpr int kRowsPerWarp = kTileRows / (kTileThreads / kWarpSize);
static_assert(kRowsPerWarp % kRowsAtOnce == 0, "a warp takes whole groups of rows");

// Elements that one instruction loads together.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount > 16 ? 16 : sizeof(Element) * kCount) Packed {
    Element elements[kCount];
};

__device__ inline float toFloat(float value) {
    return value;
}

#ifdef __CUDACC__
__device__ inline float toFloat(__half value) {
    return __half2float(value);
}

__device__ inline float toFloat(__nv_bfloat16 value) {
    return __bfloat162float(value);
}
#endif

// All lanes of the warp receive the result; the order of the sum does not depend on anything but the lane.
__device__ inline float warpSum(float value) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFU, value, distance);
    }
    return value;
}

// Thread 0 receives the best of all threads' candidates; the others receive some candidate.
template <int kThreads>
__device__ inline Candidate bestOfBlock(Candidate mine, Candidate* perWarp) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        const Candidate other = {__shfl_xor_sync(0xFFFFFFFFU, mine.value, distance), __shfl_xor_sync(0xFFFFFFFFU, mine.id, distance)};
        mine = better(mine, other);
    }
    if (threadIdx.x % kWarpSize == 0) {
        perWarp[threadIdx.x / kWarpSize] = mine;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < kThreads / kWarpSize; ++warp) {
            mine = better(mine, perWarp[warp]);
        }
    }
    return mine;
}

// Bytes of dynamic shared memory of a block of `correctionTiles`.
constexpr size_t tileSharedBytes(int32_t rank) {
    return sizeof(Candidate) * (kTileThreads / kWarpSize) + sizeof(float) * static_cast<size_t>(rank);
}

// Writes the best token of tile blockIdx.y for batch row blockIdx.x: grid (B, T), so that the blocks that share a tile run together
// and find its codebook rows in the cache.
//
// base [B, V], hidden and state [B, R] (z and s), codebook [V, R], tileValues and tileIds [B, T]; rank is a multiple of kVector.
template <typename Weight, int kVector>
__global__ void __launch_bounds__(kTileThreads)
    correctionTiles(const float* base, const float* hidden, const float* state, const Weight* codebook, int32_t vocab, int32_t rank,
                    float* tileValues, int32_t* tileIds) {
    extern __shared__ float4 sharedMemory[];
    Candidate* perWarp = reinterpret_cast<Candidate*>(sharedMemory);
    float* bottleneck = reinterpret_cast<float*>(perWarp + kTileThreads / kWarpSize);

    const int64_t row = blockIdx.x;
    for (int32_t r = threadIdx.x; r < rank; r += kTileThreads) {
        bottleneck[r] = silu(hidden[row * rank + r] + state[row * rank + r]);
    }
    __syncthreads();

    const int lane = threadIdx.x % kWarpSize;
    const int32_t first = blockIdx.y * kTileRows + threadIdx.x / kWarpSize * kRowsPerWarp;
    Candidate best = noCandidate();
    for (int32_t start = first; start < first + kRowsPerWarp && start < vocab; start += kRowsAtOnce) {
        float sums[kRowsAtOnce] = {};
        for (int32_t r = lane * kVector; r < rank; r += kWarpSize * kVector) {
            const auto middle = *reinterpret_cast<const Packed<float, kVector>*>(bottleneck + r);
            for (int i = 0; i < kRowsAtOnce; ++i) {
                // Past the vocabulary's end the last row is read again, which changes no result.
                const int64_t token = min(start + i, vocab - 1);
                const auto weights = *reinterpret_cast<const Packed<Weight, kVector>*>(codebook + token * rank + r);
                for (int j = 0; j < kVector; ++j) {
                    sums[i] += toFloat(weights.elements[j]) * middle.elements[j];
                }
            }
        }
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const int32_t token = min(start + i, vocab - 1);
            best = better(best, {base[row * vocab + token] + warpSum(sums[i]), token});
        }
    }
    best = bestOfBlock<kTileThreads>(best, perWarp);
    if (threadIdx.x == 0) {
        tileValues[row * gridDim.y + blockIdx.y] = best.value;
        tileIds[row * gridDim.y + blockIdx.y] = best.id;
    }
}

// Writes the best of the tiles of batch row blockIdx.x: grid (B).
//
// tileValues and tileIds [B, T], tokenIds and correctedLogits [B].
__global__ void __launch_bounds__(kReduceThreads)
    reduceTiles(const float* tileValues, const int32_t* tileIds, int32_t tiles, int64_t* tokenIds, float* correctedLogits) {
    extern __shared__ float4 sharedMemory[];
    const int64_t row = blockIdx.x;
    Candidate best = noCandidate();
    for (int32_t tile = threadIdx.x; tile < tiles; tile += kReduceThreads) {
        best = better(best, {tileValues[row * tiles + tile], tileIds[row * tiles + tile]});
    }
    best = bestOfBlock<kReduceThreads>(best, reinterpret_cast<Candidate*>(sharedMemory));
    if (threadIdx.x == 0) {
        tokenIds[row] = best.id;
        correctedLogits[row] = best.value;
    }
}

}  // namespace domino
