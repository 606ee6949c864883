// Visits to rows of a matrix [*, F]: reductions of each row, and weighted sums of rows.
//
// A row is cut into slices of 8, 4, 2 or 1 whole vectors and a tail, each known at compile time, so
// that the accumulators of a slice stay in registers over all rows. The usual widths are one or two
// slices.
#pragma once

#include "vec.h"

namespace dcgnn::cpu::DCGNN_ISA {

// NV whole vectors of a row, from channel `first`.
template <class A, int NV>
struct FullSlice {
  static constexpr int kVectors = NV;
  int64_t first;
  template <class T>
  DCGNN_INLINE Vec<A> load(const T* row, int v) const {
    return DCGNN_ISA::load(row + first + v * kLanes<A>);
  }
  template <class T>
  DCGNN_INLINE void store(T* row, int v, Vec<A> value) const {
    DCGNN_ISA::store(row + first + v * kLanes<A>, value);
  }
};

// The last channels of a row, fewer than a vector.
template <class A>
struct TailSlice {
  static constexpr int kVectors = 1;
  int64_t first;
  int count;
  template <class T>
  DCGNN_INLINE Vec<A> load(const T* row, int) const {
    return load_partial(row + first, count);
  }
  template <class T>
  DCGNN_INLINE void store(T* row, int, Vec<A> value) const {
    store_partial(row + first, value, count);
  }
};

// visit(slice) for the slices of a row of `channels`, at most MaxVectors (8, 4, 2 or 1) vectors
// each.
template <class A, int MaxVectors, class Visit>
DCGNN_INLINE void for_each_slice(int64_t channels, const Visit& visit) {
  int64_t first = 0;
  const auto left = [&] { return (channels - first) / kLanes<A>; };
  if constexpr (MaxVectors >= 8) {
    for (; left() >= 8; first += 8 * kLanes<A>) visit(FullSlice<A, 8>{first});
  }
  if constexpr (MaxVectors >= 4) {
    for (; left() >= 4; first += 4 * kLanes<A>) visit(FullSlice<A, 4>{first});
  }
  if constexpr (MaxVectors >= 2) {
    for (; left() >= 2; first += 2 * kLanes<A>) visit(FullSlice<A, 2>{first});
  }
  for (; left() >= 1; first += kLanes<A>) visit(FullSlice<A, 1>{first});
  if (first < channels) visit(TailSlice<A>{first, static_cast<int>(channels - first)});
}

template <class T>
DCGNN_INLINE void prefetch_row(const T* row, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const int64_t size = count * static_cast<int64_t>(sizeof(T));
  for (int64_t b = 0; b < size; b += 64) __builtin_prefetch(bytes + b);
}

// A random row costs a cache miss or two; asking for it this many rows ahead hides most of it.
constexpr int64_t kPrefetchRows = 12;

// Rows named by an index array. Prefetching may run past the last row, into the next ego's.
template <class T, class Index>
struct GatheredRows {
  using Storage = T;
  const T* base;
  int64_t channels;
  const Index* index;
  const Index* index_end;
  DCGNN_INLINE const T* row(int64_t k) const {
    return base + static_cast<int64_t>(index[k]) * channels;
  }
  DCGNN_INLINE void prefetch(int64_t k) const {
    if (index + k + kPrefetchRows < index_end) prefetch_row(row(k + kPrefetchRows), channels);
  }
  GatheredRows from(int64_t k) const { return {base, channels, index + k, index_end}; }
};

// Consecutive rows; the hardware prefetches.
template <class T>
struct ConsecutiveRows {
  using Storage = T;
  const T* base;
  int64_t channels;
  DCGNN_INLINE const T* row(int64_t k) const { return base + k * channels; }
  DCGNN_INLINE void prefetch(int64_t) const {}
  ConsecutiveRows from(int64_t k) const { return {base + k * channels, channels}; }
};

// Terms of a row reduction: with vectors a (and b) of the same width as the row z,
struct SquaredDistance {  // (z - a)^2
  template <class V>
  static DCGNN_INLINE V add(V sum, V z, V a, V) {
    const V difference = z - a;
    return sum + difference * difference;
  }
};
struct Dot {  // z a
  template <class V>
  static DCGNN_INLINE V add(V sum, V z, V a, V) {
    return sum + z * a;
  }
};
struct CentredDot {  // (z - b) a
  template <class V>
  static DCGNN_INLINE V add(V sum, V z, V a, V b) {
    return sum + (z - b) * a;
  }
};

// out[c * stride + k] = sum over the channels of Term(row k, a + c * F, b), for NC vectors a at
// once.
template <class Term, int NC, bool kPrefetch, class Rows, class T, class A>
void reduce_rows(const Rows& rows, int64_t count, const T* a, const T* b, A* out, int64_t stride) {
  const int64_t channels = rows.channels;
  if (channels == 0) {
    for (int c = 0; c < NC; ++c) {
      for (int64_t k = 0; k < count; ++k) out[c * stride + k] = 0;
    }
  }
  constexpr int kMax = kVectorRegisters / 4 / (NC > 2 ? 2 : 1);
  for_each_slice<A, kMax>(channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> left[NC][NV], right[NV];
    for (int v = 0; v < NV; ++v) {
      right[v] = b == nullptr ? Vec<A>{} : slice.load(b, v);
      for (int c = 0; c < NC; ++c) left[c][v] = slice.load(a + c * channels, v);
    }
    for (int64_t k = 0; k < count; ++k) {
      if (kPrefetch && slice.first == 0) rows.prefetch(k);
      const auto* row = rows.row(k);
      Vec<A> sums[NC] = {};
      for (int v = 0; v < NV; ++v) {
        const Vec<A> z = slice.load(row, v);
        for (int c = 0; c < NC; ++c) sums[c] = Term::add(sums[c], z, left[c][v], right[v]);
      }
      A totals[NC];
      if constexpr (NC == 1) totals[0] = reduce_add<A>(sums[0]);
      for (int c = 0; c + 1 < NC; c += 2) {
        reduce_add_two<A>(sums[c], sums[c + 1], totals[c], totals[c + 1]);
      }
      for (int c = 0; c < NC; ++c) {
        A* value = out + c * stride + k;
        *value = slice.first == 0 ? totals[c] : *value + totals[c];
      }
    }
  });
}

// The same for any number of vectors, four, two or one at a time. Only the first visit prefetches.
template <class Term, bool kPrefetch, class Rows, class T, class A>
void reduce_rows_by_all(const Rows& rows, int64_t count, const T* vectors, int64_t num_vectors,
                        A* out, int64_t stride) {
  const T* none = nullptr;
  int64_t c = 0;
  const auto part = [&](auto size) {
    constexpr int NC = decltype(size)::value;
    const T* a = vectors + c * rows.channels;
    if (kPrefetch && c == 0) {
      reduce_rows<Term, NC, true>(rows, count, a, none, out + c * stride, stride);
    } else {
      reduce_rows<Term, NC, false>(rows, count, a, none, out + c * stride, stride);
    }
    c += NC;
  };
  while (num_vectors - c >= 4) part(std::integral_constant<int, 4>{});
  if (num_vectors - c >= 2) part(std::integral_constant<int, 2>{});
  if (num_vectors - c >= 1) part(std::integral_constant<int, 1>{});
}

// sums[c * F + f] = sum_k weights[c * stride + k] (row_k[f] - centres[c * F + f]); not kCentred:
// centres 0.
template <int NC, bool kCentred, class Rows, class T, class A>
void weighted_sums(const Rows& rows, int64_t count, const A* weights, int64_t stride,
                   const T* centres, A* sums) {
  const int64_t channels = rows.channels;
  constexpr int kMax = kVectorRegisters / 4;
  for_each_slice<A, kMax>(channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> acc[NC][NV] = {};
    for (int64_t k = 0; k < count; ++k) {
      const auto* row = rows.row(k);
      for (int v = 0; v < NV; ++v) {
        const Vec<A> z = slice.load(row, v);
        for (int c = 0; c < NC; ++c) {
          const A weight = weights[c * stride + k];
          if constexpr (kCentred) {
            acc[c][v] += weight * (z - slice.load(centres + c * channels, v));
          } else {
            acc[c][v] += weight * z;
          }
        }
      }
    }
    for (int c = 0; c < NC; ++c) {
      for (int v = 0; v < NV; ++v) slice.store(sums + c * channels, v, acc[c][v]);
    }
  });
}

// The same for any number of weight columns, two or one at a time.
template <bool kCentred, class Rows, class T, class A>
void weighted_sums_of_all(const Rows& rows, int64_t count, const A* weights, int64_t stride,
                          int64_t num_columns, const T* centres, A* sums) {
  const int64_t channels = rows.channels;
  int64_t c = 0;
  const auto part = [&](auto size) {
    constexpr int NC = decltype(size)::value;
    const T* centre = kCentred ? centres + c * channels : nullptr;
    weighted_sums<NC, kCentred>(rows, count, weights + c * stride, stride, centre,
                                sums + c * channels);
    c += NC;
  };
  while (num_columns - c >= 2) part(std::integral_constant<int, 2>{});
  if (num_columns - c >= 1) part(std::integral_constant<int, 1>{});
}

}  // namespace dcgnn::cpu::DCGNN_ISA
