// The kernels of plugins/csrc on the CPU, called from Python by way of ctypes.
#include "cuda_on_cpu.h"

namespace domino {

float4 sharedMemory[cuda_on_cpu::kSharedBytes / sizeof(float4)];

// The upper half of a float32.
struct Bfloat16 {
    uint16_t bits;
};

inline float toFloat(Bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    __builtin_memcpy(&result, &bits, sizeof(result));
    return result;
}

}  // namespace domino

#include "correction_kernels.cuh"

namespace {

void reduce(int32_t batch, int32_t tiles, const float* tileValues, const int32_t* tileIds, int64_t* tokenIds, float* correctedLogits) {
    using namespace domino;
    cuda_on_cpu::launch({unsigned(batch)}, kReduceThreads, reinterpret_cast<float*>(sharedMemory),
                        sizeof(Candidate) * kReduceThreads / kWarpSize,
                        [=] { reduceTiles(tileValues, tileIds, tiles, tokenIds, correctedLogits); });
}

template <typename Weight, int kVector>
void correct(int32_t batch, int32_t vocab, int32_t rank, const float* base, const float* hidden, const float* state, const void* codebook,
             float* tileValues, int32_t* tileIds, int64_t* tokenIds, float* correctedLogits) {
    using namespace domino;
    auto* shared = reinterpret_cast<float*>(sharedMemory);
    const int32_t tiles = (vocab + kTileRows - 1) / kTileRows;
    cuda_on_cpu::launch({unsigned(batch), unsigned(tiles)}, kTileThreads, shared, tileSharedBytes(rank), [=] {
        correctionTiles<Weight, kVector>(base, hidden, state, static_cast<const Weight*>(codebook), vocab, rank, tileValues, tileIds);
    });
    reduce(batch, tiles, tileValues, tileIds, tokenIds, correctedLogits);
}

}  // namespace

extern "C" void reduce_tiles(int32_t batch, int32_t tiles, const float* tileValues, const int32_t* tileIds, int64_t* tokenIds,
                             float* correctedLogits) {
    reduce(batch, tiles, tileValues, tileIds, tokenIds, correctedLogits);
}

#define DOMINO_CORRECTION(NAME, WEIGHT, VECTOR)                                                                                        \
    extern "C" void NAME(int32_t batch, int32_t vocab, int32_t rank, const float* base, const float* hidden, const float* state,       \
                         const void* codebook, float* tileValues, int32_t* tileIds, int64_t* tokenIds, float* correctedLogits) {       \
        correct<WEIGHT, VECTOR>(batch, vocab, rank, base, hidden, state, codebook, tileValues, tileIds, tokenIds, correctedLogits);    \
    }

DOMINO_CORRECTION(correct_float32, float, 1)
DOMINO_CORRECTION(correct_float32_by_4, float, 4)
DOMINO_CORRECTION(correct_bfloat16, domino::Bfloat16, 1)
DOMINO_CORRECTION(correct_bfloat16_by_8, domino::Bfloat16, 8)
