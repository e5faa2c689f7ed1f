// CUDA's words for a kernel that runs on the CPU: one block after the other, the threads of a block as coroutines that take turns.
//
// What a kernel of plugins/csrc uses is here, and no more.  A thread that waits hands over to the next one, so a kernel whose threads
// do not all arrive at a barrier never ends; dynamic shared memory starts as NaN.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __shared__

using std::min;

struct dim3 {
    unsigned x = 1;
    unsigned y = 1;
    unsigned z = 1;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr unsigned kWarpSize = 32;
constexpr size_t kSharedBytes = 48 * 1024;
constexpr size_t kStackBytes = 64 * 1024;

struct Barrier {
    unsigned arrived = 0;
    unsigned generation = 0;
};

struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(kStackBytes);
    bool isDone;
};

inline std::vector<Thread> threads;
inline std::vector<Barrier> warpBarriers;
inline std::vector<uint32_t> exchanged;
inline Barrier blockBarrier;
inline ucontext_t scheduler;
inline unsigned running;
inline std::function<void()> kernel;

inline void handOver() {
    const unsigned me = threadIdx.x;
    swapcontext(&threads[me].context, &scheduler);
    threadIdx.x = me;
}

inline void wait(Barrier& barrier, unsigned expected) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) {
        handOver();
    }
}

inline void waitForWarp() {
    wait(warpBarriers[threadIdx.x / kWarpSize], kWarpSize);
}

inline void runThread() {
    kernel();
    threads[threadIdx.x].isDone = true;
    --running;
    swapcontext(&threads[threadIdx.x].context, &scheduler);
}

inline void runBlock() {
    running = blockDim.x;
    for (unsigned i = 0; i < blockDim.x; ++i) {
        Thread& thread = threads[i];
        thread.isDone = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.context, runThread, 0);
    }
    while (running > 0) {
        for (unsigned i = 0; i < blockDim.x; ++i) {
            if (!threads[i].isDone) {
                threadIdx.x = i;
                swapcontext(&scheduler, &threads[i].context);
            }
        }
    }
}

// Runs `body` as a kernel with `sharedBytes` of dynamic shared memory, which begins at `shared`.
inline void launch(dim3 grid, unsigned blockThreads, float* shared, size_t sharedBytes, std::function<void()> body) {
    kernel = std::move(body);
    gridDim = grid;
    blockDim = {blockThreads};
    threads.resize(blockThreads);
    warpBarriers.assign(blockThreads / kWarpSize, {});
    exchanged.assign(blockThreads, 0);
    blockBarrier = {};
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
            std::fill_n(shared, sharedBytes / sizeof(float), NAN);
            runBlock();
        }
    }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() {
    cuda_on_cpu::wait(cuda_on_cpu::blockBarrier, blockDim.x);
}

template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int distance) {
    static_assert(sizeof(Value) == sizeof(uint32_t), "a warp exchanges 32 bits at a time");
    __builtin_memcpy(&cuda_on_cpu::exchanged[threadIdx.x], &value, sizeof(value));
    cuda_on_cpu::waitForWarp();
    __builtin_memcpy(&value, &cuda_on_cpu::exchanged[threadIdx.x ^ distance], sizeof(value));
    cuda_on_cpu::waitForWarp();
    return value;
}
