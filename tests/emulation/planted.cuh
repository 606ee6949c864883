// Kernels that are right for kNoBug and wrong for every other value. nvcc compiles them to PTX and
// g++ for the host: both emulators must find the same bugs.
#pragma once

enum Bug {
  kNoBug,
  kMissingMask,
  kMissingBarrier,
  kPlainSum,
  kMisalignedVector,
  kPastTheEnd,
  kDivergentBarrier,
  kMissingWarpBarrier,
  kNumBugs
};

// out[i] = the sum of x over the block of i, total += the sum of all of x; blocks of 128.
template <int kBug>
__global__ void block_sums(const float* __restrict__ x, float* __restrict__ out,
                           float* __restrict__ total, int n) {
  __shared__ float warp_sums[4];
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  float sum = 0.f;
  if (i < n || kBug == kMissingMask) sum = x[kBug == kPastTheEnd ? i + 1 : i];
  if (i >= n && kBug == kDivergentBarrier) return;
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  if (kBug == kMissingBarrier) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  sum = warp_sums[0] + warp_sums[1] + warp_sums[2] + warp_sums[3];
  if (i < n) out[i] = sum;
  if (threadIdx.x == 0) {
    if (kBug == kPlainSum) {
      *total += sum;
    } else {
      atomicAdd(total, sum);
    }
  }
}

// Doubles rows of `width` floats, four at a time; rows begin at multiples of 16 bytes when width is
// one of 4.
template <int kBug>
__global__ void double_rows(float* __restrict__ x, int rows, int width) {
  const int row = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows) return;
  const int step = kBug == kMisalignedVector ? width - 1 : width;
  for (int c = 0; c + 4 <= step; c += 4) {
    float4* place = reinterpret_cast<float4*>(x + row * step + c);
    float4 value = *place;
    value.x *= 2, value.y *= 2, value.z *= 2, value.w *= 2;
    *place = value;
  }
}

// Reverses 32 elements through shared memory, one warp in a block.
template <int kBug>
__global__ void reverse_lanes(const float* __restrict__ x, float* __restrict__ out) {
  __shared__ float lanes[32];
  lanes[threadIdx.x] = x[threadIdx.x];
  if (kBug != kMissingWarpBarrier) __syncwarp();
  out[threadIdx.x] = lanes[31 - threadIdx.x];
}

// Instances for nvcc.
template <int kBug>
struct Instances {
  static void keep(float* p) {
#ifdef __CUDACC__
    block_sums<kBug><<<1, 1>>>(p, p, p, 1);
    double_rows<kBug><<<1, 1>>>(p, 1, 1);
    reverse_lanes<kBug><<<1, 1>>>(p, p);
    if constexpr (kBug + 1 < kNumBugs) Instances<kBug + 1>::keep(p);
#endif
    (void)p;
  }
};
template struct Instances<kNoBug>;
