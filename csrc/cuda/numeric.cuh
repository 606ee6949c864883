// Storage types, their conversions, and loads and stores of several neighbouring channels.
// float16 and bfloat16 are stored only; every sum is float, or double for float64.
#pragma once

#include <cstdint>
#include <cstring>

#define DCGNN_DEVICE __device__ __forceinline__

namespace dcgnn::cuda {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <class T>
using Acc = typename Accumulate<T>::type;

template <class To, class From>
DCGNN_DEVICE To bit_copy(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "bit_copy keeps the size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

#ifdef __CUDACC__
DCGNN_DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
DCGNN_DEVICE uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
template <class T>
DCGNN_DEVICE T load_constant(const T* address) {
  return __ldg(address);
}
using Raw16 = uint4;
#else
// The same conversions in plain C++, for the tests that run the kernels on the host.
inline float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_copy<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Exact for subnormals too: a scaled integer.
  const float value = magnitude < 0x400u ? float(magnitude) * 0x1p-24f
                                         : bit_copy<float>((magnitude << 13) + 0x38000000u);
  return sign ? -value : value;
}
inline uint16_t float_to_half(float value) {
  const uint32_t word = bit_copy<uint32_t>(value), magnitude = word & 0x7fffffffu;
  const uint16_t sign = uint16_t((word >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return sign | 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {
    // Adding 0.5 rounds to a multiple of 2^-24, the smallest subnormal.
    const float shifted = bit_copy<float>(magnitude) + 0.5f;
    return sign | uint16_t(bit_copy<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return sign | uint16_t((magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}
template <class T>
inline T load_constant(const T* address) {
  return *address;
}
struct alignas(16) [[gnu::may_alias]] Raw16 {
  uint32_t words[4];
};
#endif

DCGNN_DEVICE float widen(float value) { return value; }
DCGNN_DEVICE double widen(double value) { return value; }
DCGNN_DEVICE float widen(Half value) { return half_to_float(value.bits); }
DCGNN_DEVICE float widen(BFloat16 value) { return bit_copy<float>(uint32_t(value.bits) << 16); }

template <class T>
DCGNN_DEVICE T narrow(Acc<T> value) {
  return value;
}
template <>
DCGNN_DEVICE Half narrow<Half>(float value) {
  return {float_to_half(value)};
}
template <>
DCGNN_DEVICE BFloat16 narrow<BFloat16>(float value) {
  const uint32_t word = bit_copy<uint32_t>(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return {0x7fffu};
  return {uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
}

// One element that no kernel of this launch writes.
template <class T>
DCGNN_DEVICE T load_one(const T* address) {
  if constexpr (sizeof(T) == 2) {
    return {load_constant(&address->bits)};
  } else {
    return load_constant(address);
  }
}

// Channels that one lane loads at once: 16 bytes, the widest load, or 1 for rows that such loads do
// not fit.
template <class T>
constexpr int kFullVector = 16 / int(sizeof(T));

template <int kVector, class T>
struct Pack {
  T values[kVector];

  DCGNN_DEVICE Acc<T> operator[](int i) const { return widen(values[i]); }

  static DCGNN_DEVICE Pack load(const T* address) {
    Pack pack;
    if constexpr (kVector == 1) {
      pack.values[0] = load_one(address);
    } else {
      static_assert(sizeof(Pack) == 16, "a vector is 16 bytes");
      const Raw16 raw = load_constant(reinterpret_cast<const Raw16*>(address));
      memcpy(pack.values, &raw, 16);
    }
    return pack;
  }
  static DCGNN_DEVICE Pack zero() {
    Pack pack;
    memset(pack.values, 0, sizeof(pack.values));
    return pack;
  }
  static DCGNN_DEVICE void store(T* address, const Acc<T>* sums) {
    if constexpr (kVector == 1) {
      *address = narrow<T>(sums[0]);
    } else {
      T values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = narrow<T>(sums[i]);
      Raw16 raw;
      memcpy(&raw, values, 16);
      *reinterpret_cast<Raw16*>(address) = raw;
    }
  }
};

}  // namespace dcgnn::cuda
