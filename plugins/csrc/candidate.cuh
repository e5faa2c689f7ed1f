// What a drafted token is chosen by, for host and device code: the corrected logit and the order of candidates.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define DOMINO_HOST_DEVICE __host__ __device__
#else
#define DOMINO_HOST_DEVICE
#endif

namespace domino {

struct Candidate {
    float value;
    int32_t id;
};

// Loses to every token, whatever its logit.
DOMINO_HOST_DEVICE inline Candidate noCandidate() {
    return {-INFINITY, INT32_MAX};
}

// The order of PyTorch's argmax: NaN is highest, then the higher logit, and equals go to the lowest id.
DOMINO_HOST_DEVICE inline bool beats(Candidate left, Candidate right) {
    const bool leftIsNan = left.value != left.value;
    const bool rightIsNan = right.value != right.value;
    if (leftIsNan != rightIsNan) {
        return leftIsNan;
    }
    if (!leftIsNan && left.value != right.value) {
        return left.value > right.value;
    }
    return left.id < right.id;
}

DOMINO_HOST_DEVICE inline Candidate better(Candidate left, Candidate right) {
    return beats(right, left) ? right : left;
}

// x sigmoid(x); the exponential overflows to infinity for very negative x, and the quotient is then zero, as it should be.
DOMINO_HOST_DEVICE inline float silu(float x) {
    return x / (1.0F + expf(-x));
}

}  // namespace domino
