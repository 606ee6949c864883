// Vectors of one instruction set: load, store, select, reduce; exp and log.
//
// Every file that includes this one is compiled once for each instruction set, with DCGNN_ISA
// naming a namespace, so that the variants are different functions to the linker. For the same
// reason these files use no std:: containers: the linker keeps one copy of a std:: template,
// perhaps the AVX-512 one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "types.h"

#ifndef DCGNN_ISA
#define DCGNN_ISA baseline
#endif
#define DCGNN_INLINE inline __attribute__((always_inline))

namespace dcgnn::cpu::DCGNN_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class A>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t mask __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t mask __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vec = typename VecOf<A>::type;
template <class A>
using Mask = typename VecOf<A>::mask;
template <class A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

// The type that a storage type is computed in.
template <class T>
struct AccOf {
  using type = T;
};
template <>
struct AccOf<BFloat16> {
  using type = float;
};
template <class T>
using Acc = typename AccOf<T>::type;

template <class To, class From>
DCGNN_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class A>
DCGNN_INLINE Vec<A> splat(A value) {
  return value - Vec<A>{};
}

template <class A>
DCGNN_INLINE Vec<A> select(Mask<A> mask, Vec<A> yes, Vec<A> no) {
  return mask ? yes : no;
}
template <class A>
DCGNN_INLINE Vec<A> vmax(Vec<A> a, Vec<A> b) {
  return a > b ? a : b;
}
template <class A>
DCGNN_INLINE Vec<A> vabs(Vec<A> a) {
  return a < 0 ? -a : a;
}

// --- memory
// ---------------------------------------------------------------------------------------------

DCGNN_INLINE float to_acc(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
DCGNN_INLINE float to_acc(float x) { return x; }
DCGNN_INLINE double to_acc(double x) { return x; }

template <class T>
DCGNN_INLINE T from_acc(Acc<T> x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    if (x != x) return {0x7fc0};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // to nearest, even
  } else {
    return x;
  }
}

typedef uint16_t HalfBits __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t WordBits __attribute__((vector_size(kVectorBytes)));

template <class T>
DCGNN_INLINE Vec<Acc<T>> load(const T* p) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    // gcc 12 converts vectors of different lengths lane by lane, so that x86 names the instruction.
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return bit_cast<Vec<float>>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#elif defined(__AVX2__)
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return bit_cast<Vec<float>>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#endif
    HalfBits bits;
    std::memcpy(&bits, p, sizeof(bits));
    return bit_cast<Vec<float>>(__builtin_convertvector(bits, WordBits) << 16);
  } else {
    Vec<T> v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
}

// The upper half of every lane: v rounded to bfloat16, as from_acc does it.
DCGNN_INLINE WordBits round_to_bfloat16(Vec<float> v) {
  const WordBits bits = bit_cast<WordBits>(v);
  const WordBits nan = WordBits{} + 0x7fc00000;
  return (v != v) ? nan : bits + 0x7fff + ((bits >> 16) & 1);
}

template <class T>
DCGNN_INLINE void store(T* p, Vec<Acc<T>> v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const WordBits words = round_to_bfloat16(v) >> 16;
#if defined(__AVX512F__)
    const __m256i half = _mm512_cvtepi32_epi16(bit_cast<__m512i>(words));
#elif defined(__AVX2__)
    const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(words), __m256i{});
    const __m128i half = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    const HalfBits half = __builtin_convertvector(words, HalfBits);
#endif
    std::memcpy(p, &half, sizeof(half));
  } else {
    std::memcpy(p, &v, sizeof(v));
  }
}

// The same past the caches, for what will not be read soon: the memory is not read first. p is a
// multiple of the vector's bytes. Others may read after a stream_fence().
template <class V>
DCGNN_INLINE void stream(void* p, V v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(p), bit_cast<__m512i>(v));
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(p), bit_cast<__m256i>(v));
#elif defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(p), bit_cast<__m128i>(v));
#else
  std::memcpy(p, &v, sizeof(v));
#endif
}

DCGNN_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// 2 kLanes bfloat16 as pairs of neighbours: one vector of the first of each pair and one of the
// second cost an instruction each to load, and to store no more than two in order.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of a pair is the lower half");
constexpr uint32_t kUpperHalf = 0xffff0000;

template <bool kSecond>
DCGNN_INLINE Vec<float> load_of_pairs(const BFloat16* p) {
  WordBits pairs;
  std::memcpy(&pairs, p, sizeof(pairs));
  return bit_cast<Vec<float>>(kSecond ? pairs & kUpperHalf : pairs << 16);
}

DCGNN_INLINE WordBits make_pairs(Vec<float> first, Vec<float> second) {
  return (round_to_bfloat16(first) >> 16) | (round_to_bfloat16(second) & kUpperHalf);
}

DCGNN_INLINE void store_pairs(BFloat16* p, Vec<float> first, Vec<float> second) {
  const WordBits pairs = make_pairs(first, second);
  std::memcpy(p, &pairs, sizeof(pairs));
}

// The first count < kLanes elements; the other lanes are 0.
template <class T>
DCGNN_INLINE Vec<Acc<T>> load_partial(const T* p, int count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p);
    return bit_cast<Vec<float>>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  } else {
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), p);
  }
#else
  Acc<T> lanes[kLanes<Acc<T>>] = {};
  for (int c = 0; c < count; ++c) lanes[c] = to_acc(p[c]);
  return load(lanes);
#endif
}

template <int kSize, class T>
DCGNN_INLINE void copy_few(T* to, const T* from, int count) {
  if (count & kSize) {
    std::memcpy(to, from, kSize * sizeof(T));
    to += kSize;
    from += kSize;
  }
  if constexpr (kSize > 1) copy_few<kSize / 2>(to, from, count);
}

// The first count < kLanes elements.
template <class T>
DCGNN_INLINE void store_partial(T* p, Vec<Acc<T>> v, int count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), v);
    return;
  } else if constexpr (std::is_same_v<T, double>) {
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << count) - 1), v);
    return;
  }
#endif
  T lanes[kLanes<Acc<T>>];
  store(lanes, v);
  copy_few<kLanes<Acc<T>> / 2>(p, lanes, count);
}

// All elements, or the first `left` if there are no more; none if left < 0.
template <class T>
DCGNN_INLINE void store_some(T* p, Vec<Acc<T>> v, int64_t left) {
  if (left >= kLanes<Acc<T>>) {
    store(p, v);
  } else if (left > 0) {
    store_partial(p, v, static_cast<int>(left));
  }
}

// a_0 b_0 a_1 b_1 ...
template <class A>
DCGNN_INLINE void interleave(Vec<A> a, Vec<A> b, Vec<A> (&pairs)[2]) {
  constexpr int kHalf = kLanes<A> / 2;
#if defined(__clang__)
  for (int c = 0; c < kLanes<A>; ++c) {
    pairs[0][c] = c % 2 == 0 ? a[c / 2] : b[c / 2];
    pairs[1][c] = c % 2 == 0 ? a[kHalf + c / 2] : b[kHalf + c / 2];
  }
#else
  Mask<A> order;
  for (int c = 0; c < kLanes<A>; ++c) order[c] = c / 2 + (c % 2) * kLanes<A>;
  pairs[0] = __builtin_shuffle(a, b, order);
  pairs[1] = __builtin_shuffle(a, b, order + kHalf);
#endif
}

template <class A>
DCGNN_INLINE A reduce_add(Vec<A> v) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) return _mm512_reduce_add_ps(v);
  if constexpr (std::is_same_v<A, double>) return _mm512_reduce_add_pd(v);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<A, float>) {
    __m128 quad = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    quad = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(quad, _mm_movehdup_ps(quad)));
  }
#endif
  A lanes[kLanes<A>];
  store(lanes, v);
  for (int half = kLanes<A> / 2; half > 0; half /= 2) {
    for (int c = 0; c < half; ++c) lanes[c] += lanes[c + half];
  }
  return lanes[0];
}

// The sums of eight vectors; together they need half the shuffles of eight sums one by one.
template <class A>
DCGNN_INLINE void reduce_add_eight(const Vec<A> (&v)[8], A (&sums)[8]) {
#if defined(__AVX512DQ__)
  if constexpr (std::is_same_v<A, float>) {
    const auto halves = [](__m512 a, __m512 b) {  // lanes: a a b b, each the sum of two
      return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const auto quarters = [](__m512 a, __m512 b) {
      return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    const __m512 low = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
    const __m512 high = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
    const __m512 pairs =
        _mm512_add_ps(_mm512_unpacklo_ps(low, high), _mm512_unpackhi_ps(low, high));
    const __m512 all = _mm512_add_ps(pairs, _mm512_shuffle_ps(pairs, pairs, 0x4e));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(sums, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all)));
    return;
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<A, float>) {
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                                         _mm256_permute2f128_ps(low, high, 0x31)));
    return;
  }
#endif
  for (int k = 0; k < 8; ++k) sums[k] = reduce_add<A>(v[k]);
}

template <class A>
DCGNN_INLINE A reduce_max(Vec<A> v) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) return _mm512_reduce_max_ps(v);
  if constexpr (std::is_same_v<A, double>) return _mm512_reduce_max_pd(v);
#endif
  A lanes[kLanes<A>];
  store(lanes, v);
  for (int half = kLanes<A> / 2; half > 0; half /= 2) {
    for (int c = 0; c < half; ++c)
      lanes[c] = lanes[c] > lanes[c + half] ? lanes[c] : lanes[c + half];
  }
  return lanes[0];
}

// 1 / x for a normal x, to about a unit in the last place: float division is slow on wide vectors.
template <class A>
DCGNN_INLINE Vec<A> reciprocal(Vec<A> x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) {
    const Vec<A> guess = _mm512_rcp14_ps(x);
    return guess * (A(2) - x * guess);
  }
#endif
  return A(1) / x;
}

// True in the lanes 0 .. count-1: rows of a block come in whole vectors, the last one is not full.
template <class A>
DCGNN_INLINE Mask<A> live_lanes(int64_t count) {
  Mask<A> lane;
  for (int c = 0; c < kLanes<A>; ++c) lane[c] = c;
  using Int = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
  const Int limit = static_cast<Int>(count < kLanes<A> ? count : kLanes<A>);
  return lane < limit;
}

// --- exp and log
// ----------------------------------------------------------------------------------------

template <class A>
struct FloatBits;
template <>
struct FloatBits<float> {
  using Int = int32_t;
  static constexpr int kMantissa = 23, kBias = 127, kExpTerms = 7, kLogTerms = 6, kTanhTerms = 5;
  static constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kExpMin = -87.3f, kExpMax = 88.f;
  static constexpr int32_t kSqrtHalf = 0x3f3504f3;
};
template <>
struct FloatBits<double> {
  using Int = int64_t;
  static constexpr int kMantissa = 52, kBias = 1023, kExpTerms = 13, kLogTerms = 12, kTanhTerms = 9;
  static constexpr double kRound = 6755399441055744.;  // 1.5 * 2^52
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kExpMin = -708., kExpMax = 709.;
  static constexpr int64_t kSqrtHalf = 0x3fe6a09e667f3bcd;
};

// exp(x) = 2^k exp(r) with |r| <= ln(2)/2 and the Taylor polynomial of exp(r). Below kExpMin: 0.
template <class A>
DCGNN_INLINE Vec<A> vexp(Vec<A> x) {
  using Bits = FloatBits<A>;
  const Mask<A> zero = x < Bits::kExpMin;
  x = x < Bits::kExpMin ? splat<A>(Bits::kExpMin) : x;
  x = x > Bits::kExpMax ? splat<A>(Bits::kExpMax) : x;
  const Vec<A> shifted = x * A(1.4426950408889634) + Bits::kRound;
  const Vec<A> k = shifted - Bits::kRound;
  const Vec<A> r = (x - k * Bits::kLn2High) - k * Bits::kLn2Low;
  Vec<A> sum = splat<A>(1);
  for (int term = Bits::kExpTerms; term >= 1; --term) sum = sum * (r * (A(1) / A(term))) + A(1);
  const Mask<A> exponent = bit_cast<Mask<A>>(shifted) - bit_cast<typename Bits::Int>(Bits::kRound);
  const Vec<A> power = bit_cast<Vec<A>>((exponent + Bits::kBias) << Bits::kMantissa);
  return select<A>(zero, Vec<A>{}, sum * power);
}

// log(x) of a positive normal x: k ln(2) + 2 artanh((m-1)/(m+1)), m in [sqrt(1/2), sqrt(2)).
template <class A>
DCGNN_INLINE Vec<A> vlog(Vec<A> x) {
  using Bits = FloatBits<A>;
  const Mask<A> bits = bit_cast<Mask<A>>(x);
  const Mask<A> k = (bits - Bits::kSqrtHalf) >> Bits::kMantissa;
  const Vec<A> m = bit_cast<Vec<A>>(bits - (k << Bits::kMantissa));
  const Vec<A> q = (m - A(1)) / (m + A(1));
  const Vec<A> q2 = q * q;
  Vec<A> sum = splat<A>(A(1) / A(2 * Bits::kLogTerms - 1));
  for (int term = Bits::kLogTerms - 2; term >= 0; --term) sum = sum * q2 + A(1) / A(2 * term + 1);
  const Vec<A> exponent = __builtin_convertvector(k, Vec<A>);
  return exponent * A(0.69314718055994531) + A(2) * q * sum;
}

// tanh(x): near 0 by its continued fraction x/(1 + x^2/(3 + x^2/(5 + ..))), elsewhere by exp.
template <class A>
DCGNN_INLINE Vec<A> vtanh(Vec<A> x) {
  const Vec<A> size = vabs<A>(x), square = x * x;
  Vec<A> p = splat<A>(A(2 * FloatBits<A>::kTanhTerms - 1)), q = splat<A>(1);
  for (int term = FloatBits<A>::kTanhTerms - 1; term >= 1; --term) {
    const Vec<A> next = A(2 * term - 1) * p + square * q;
    q = p;
    p = next;
  }
  const Vec<A> e = vexp<A>(A(-2) * size);
  const Vec<A> far = (A(1) - e) / (A(1) + e);
  return select<A>(size < A(0.625), x * q / p, select<A>(x < 0, -far, far));
}

// sigmoid(x) and sigmoid(-x), both to full relative precision.
template <class A>
DCGNN_INLINE void sigmoid_pair(Vec<A> x, Vec<A>& positive, Vec<A>& negative) {
  const Vec<A> e = vexp<A>(-vabs<A>(x));
  const Vec<A> large = reciprocal<A>(A(1) + e);
  const Vec<A> small = e * large;
  const Mask<A> up = x > 0;
  positive = select<A>(up, large, small);
  negative = select<A>(up, small, large);
}

}  // namespace dcgnn::cpu::DCGNN_ISA
