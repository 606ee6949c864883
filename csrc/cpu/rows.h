// Visits to rows of a matrix [*, F]: reductions of each row, and weighted sums of rows.
//
// A row is cut into slices of 8, 4, 2 or 1 whole vectors and a tail, each known at compile time, so
// that the accumulators of a slice stay in registers over all rows. The usual widths are one or two
// slices.
#pragma once

#include "split.h"
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

// Rows named by the entries begin, begin + 1, ... of an index array of index_end entries.
// Prefetching may run past the last row of a visit, into the next ego's.
template <class T>
struct GatheredRows {
  using Storage = T;
  const T* base;
  int64_t channels;
  IndexArray index;
  int64_t index_end;
  int64_t begin;

  DCGNN_INLINE const T* row(int64_t k) const { return base + index[begin + k] * channels; }
  DCGNN_INLINE void prefetch(int64_t k) const {
    const int64_t ahead = k + kPrefetchRows;
    if (begin + ahead < index_end) prefetch_row(row(ahead), channels);
  }
  GatheredRows from(int64_t k) const { return {base, channels, index, index_end, begin + k}; }
};

// The rows 0 .. count - 1.
template <class T>
GatheredRows<T> consecutive_rows(const T* base, int64_t channels, int64_t count) {
  return {base, channels, IndexArray{}, count, 0};
}

// The visits below take their rows by value: a copy of their own stays in registers.

// Sums over the channels of a row z, with kVectors vectors of the same width:
template <int NC>
struct SquaredDistances {  // |z - a_c|^2
  static constexpr int kVectors = NC, kSums = NC;
  template <class V>
  static DCGNN_INLINE void add(V* sums, V z, const V* a) {
    for (int c = 0; c < NC; ++c) {
      const V difference = z - a[c];
      sums[c] += difference * difference;
    }
  }
};
template <int NC>
struct Dots {  // z . a_c
  static constexpr int kVectors = NC, kSums = NC;
  template <class V>
  static DCGNN_INLINE void add(V* sums, V z, const V* a) {
    for (int c = 0; c < NC; ++c) sums[c] += z * a[c];
  }
};
struct CentredDot {  // (z - a_0) . a_1
  static constexpr int kVectors = 2, kSums = 1;
  template <class V>
  static DCGNN_INLINE void add(V* sums, V z, const V* a) {
    sums[0] += (z - a[0]) * a[1];
  }
};
struct CentredSquareAndDot {  // |z - a_0|^2 and (z - a_0) . a_1
  static constexpr int kVectors = 2, kSums = 2;
  template <class V>
  static DCGNN_INLINE void add(V* sums, V z, const V* a) {
    const V difference = z - a[0];
    sums[0] += difference * difference;
    sums[1] += difference * a[1];
  }
};

// out[c * stride + k] = sum c of row k. The rows go eight sums at a time through the same
// instructions, the last row repeated, so that equal rows give equal bits wherever they stand; a
// column has room for a count rounded up to kPaddedRows.
template <class Sums, bool kPrefetch, class Rows, class V, class A>
void reduce_rows(const Rows rows, int64_t count, const V* vectors, A* out, int64_t stride) {
  constexpr int NC = Sums::kSums, kRows = 8 / NC;
  const int64_t channels = rows.channels;
  if (channels == 0) {
    for (int c = 0; c < NC; ++c) {
      for (int64_t k = 0; k < count; ++k) out[c * stride + k] = 0;
    }
  }
  constexpr int kMax = kVectorRegisters / 4 / (Sums::kVectors > 2 ? 2 : 1);
  for_each_slice<A, kMax>(channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> fixed[NV][Sums::kVectors];
    for (int v = 0; v < NV; ++v) {
      for (int c = 0; c < Sums::kVectors; ++c) fixed[v][c] = slice.load(vectors + c * channels, v);
    }
    for (int64_t k = 0; k < count; k += kRows) {
      Vec<A> sums[8];  // [c][row]
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const int64_t index = k + r < count ? k + r : count - 1;
        if (kPrefetch && slice.first == 0) rows.prefetch(index);
        const auto* row = rows.row(index);
        Vec<A> own[NC] = {};
        for (int v = 0; v < NV; ++v) Sums::add(own, slice.load(row, v), fixed[v]);
        for (int c = 0; c < NC; ++c) sums[c * kRows + r] = own[c];
      }
      A totals[8];
      reduce_add_eight<A>(sums, totals);
      for (int c = 0; c < NC; ++c) {
        A* values = out + c * stride + k;
        for (int r = 0; r < kRows; ++r) {
          const A total = totals[c * kRows + r];
          values[r] = slice.first == 0 ? total : values[r] + total;
        }
      }
    }
  });
}

// The same for any number of vectors, four, two or one at a time. Only the first visit prefetches.
template <template <int> class Sums, bool kPrefetch, class Rows, class V, class A>
void reduce_rows_by_all(const Rows& rows, int64_t count, const V* vectors, int64_t num_vectors,
                        A* out, int64_t stride) {
  int64_t c = 0;
  const auto part = [&](auto size) {
    using Part = Sums<decltype(size)::value>;
    const V* a = vectors + c * rows.channels;
    if (kPrefetch && c == 0) {
      reduce_rows<Part, true>(rows, count, a, out + c * stride, stride);
    } else {
      reduce_rows<Part, false>(rows, count, a, out + c * stride, stride);
    }
    c += decltype(size)::value;
  };
  while (num_vectors - c >= 4) part(std::integral_constant<int, 4>{});
  if (num_vectors - c >= 2) part(std::integral_constant<int, 2>{});
  if (num_vectors - c >= 1) part(std::integral_constant<int, 1>{});
}

// sums = rows 0 .. count - 1 without the one at `skip`.
template <class Rows, class A>
void sum_rows(const Rows rows, int64_t count, int64_t skip, A* sums) {
  for_each_slice<A, kVectorRegisters / 4>(rows.channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> acc[NV] = {};
    for (int64_t k = 0; k < count; ++k) {
      if (slice.first == 0) rows.prefetch(k);
      if (k == skip) continue;
      for (int v = 0; v < NV; ++v) acc[v] += slice.load(rows.row(k), v);
    }
    for (int v = 0; v < NV; ++v) slice.store(sums, v, acc[v]);
  });
}

// sums[c * F + f] = sum_k weights[c * stride + k] (row_k[f] - centres[c * F + f]); not kCentred:
// centres 0.
template <int NC, bool kCentred, class Rows, class V, class A>
void weighted_sums(const Rows rows, int64_t count, const A* weights, int64_t stride,
                   const V* centres, A* sums) {
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
