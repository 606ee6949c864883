// Visits to rows of a matrix [*, F]: reductions of each row, and weighted sums of rows.
//
// A row is cut into slices of 8, 4, 2 or 1 whole vectors and a tail, each known at compile time, so
// that the accumulators of a slice stay in registers over all rows. The usual widths are one or two
// slices.
//
// Two or more vectors of a bfloat16 row are taken as pairs of neighbours (load_of_pairs): in a
// slice's vectors v and v + 1, v even, stand the first and the second of each pair. Float arrays
// that belong to such rows, and are read and written by slices of the same row only, keep that
// order.
#pragma once

#include "split.h"
#include "vec.h"

namespace dcgnn::cpu::DCGNN_ISA {

// Rows that are written once and read later, by a gather or by somebody else. Large ones pass the
// caches by, which would read the old rows first and lose what is in use.
template <class T>
struct OutputRows {
  T* data;
  bool streamed;
  OutputRows operator+(int64_t count) const { return {data + count, streamed}; }
};

template <class T>
OutputRows<T> output_rows(void* data, int64_t num_rows, int64_t channels) {
  const int64_t bytes = channels * static_cast<int64_t>(sizeof(T));
  const bool aligned = reinterpret_cast<uintptr_t>(data) % 64 == 0 && bytes % 64 == 0;
  return {static_cast<T*>(data), aligned && num_rows * bytes >= streamed_bytes()};
}

template <class T>
constexpr bool kIsBFloat16 = std::is_same_v<T, BFloat16>;

// NV whole vectors of a row, from channel `first`.
template <class A, int NV>
struct FullSlice {
  static constexpr int kVectors = NV;
  int64_t first;
  template <class T>
  DCGNN_INLINE Vec<A> load(const T* row, int v) const {
    if constexpr (kIsBFloat16<T> && NV > 1) {
      const T* pairs = row + first + v / 2 * 2 * kLanes<A>;
      return v % 2 == 0 ? load_of_pairs<false>(pairs) : load_of_pairs<true>(pairs);
    } else {
      return DCGNN_ISA::load(row + first + v * kLanes<A>);
    }
  }
  DCGNN_INLINE void store(A* row, int v, Vec<A> value) const {
    DCGNN_ISA::store(row + first + v * kLanes<A>, value);
  }
  // Vector v becomes value(v).
  template <class T, class Value>
  DCGNN_INLINE void write(T* row, const Value& value) const {
    if constexpr (kIsBFloat16<T> && NV > 1) {
      for (int v = 0; v < NV; v += 2) {
        store_pairs(row + first + v * kLanes<A>, value(v), value(v + 1));
      }
    } else {
      for (int v = 0; v < NV; ++v) DCGNN_ISA::store(row + first + v * kLanes<A>, value(v));
    }
  }
  template <class T, class Value>
  DCGNN_INLINE void write(const OutputRows<T>& row, const Value& value) const {
    if (!row.streamed || (kIsBFloat16<T> && NV == 1)) {
      write(row.data, value);
    } else if constexpr (kIsBFloat16<T> && NV > 1) {
      for (int v = 0; v < NV; v += 2) {
        stream(row.data + first + v * kLanes<A>, make_pairs(value(v), value(v + 1)));
      }
    } else {
      for (int v = 0; v < NV; ++v) stream(row.data + first + v * kLanes<A>, value(v));
    }
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
  DCGNN_INLINE void store(A* row, int, Vec<A> value) const {
    store_partial(row + first, value, count);
  }
  template <class T, class Value>
  DCGNN_INLINE void write(T* row, const Value& value) const {
    store_partial(row + first, value(0), count);
  }
  template <class T, class Value>
  DCGNN_INLINE void write(const OutputRows<T>& row, const Value& value) const {
    write(row.data, value);
  }
};

// visit(slice) for the slices of a row of `channels`, at most MaxVectors (8, 4 or 2) vectors each.
template <class A, int MaxVectors, class Visit>
DCGNN_INLINE void for_each_slice(int64_t channels, const Visit& visit) {
  static_assert(MaxVectors >= 2, "all visits to a row agree on its pairs");
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
  if (left() >= 1) {
    visit(FullSlice<A, 1>{first});
    first += kLanes<A>;
  }
  if (first < channels) visit(TailSlice<A>{first, static_cast<int>(channels - first)});
}

// out: T* or OutputRows<T>.
template <class Out, class A>
DCGNN_INLINE void write_row(const Out& out, const A* values, int64_t channels) {
  for_each_slice<A, 2>(channels, [&](auto slice) {
    slice.write(out, [&](int v) { return slice.load(values, v); });
  });
}

template <class Out, class A>
DCGNN_INLINE void write_rows(const Out& out, const A* values, int64_t count, int64_t channels) {
  for (int64_t k = 0; k < count; ++k)
    write_row(out + k * channels, values + k * channels, channels);
}

// So many accumulators leave registers for weights on every instruction set.
constexpr int kSliceVectors = 8;

// gcc takes a function that only prefetches for one without effect and drops the calls to it that
// it has not inlined; the empty statement is an effect. Lines come into the second cache: the
// nearest one can wait for too few at a time to keep the memory busy.
DCGNN_INLINE void prefetch_line(const void* address) {
  constexpr int kRead = 0, kSecondCache = 2;
  __builtin_prefetch(address, kRead, kSecondCache);
  asm volatile("");
}

template <class T>
DCGNN_INLINE void prefetch_row(const T* row, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const char* const end = bytes + count * static_cast<int64_t>(sizeof(T));
  for (; bytes + 256 <= end; bytes += 256) {
    for (int line = 0; line < 4; ++line) prefetch_line(bytes + 64 * line);
  }
  for (; bytes < end; bytes += 64) prefetch_line(bytes);
}

// How many items of `bytes` to ask ahead: some 8 KB of them, 4 to 64 items; a power of two, which
// takes no division.
DCGNN_INLINE int64_t prefetch_distance(int64_t bytes) {
  const int magnitude = 64 - __builtin_clzll(static_cast<unsigned long long>(bytes) | 1);
  const int exponent = 14 - magnitude;
  return int64_t{1} << (exponent < 2 ? 2 : exponent > 6 ? 6 : exponent);
}

// Rows named by the entries 0, 1, ... of an array of `left` 32-bit numbers. Prefetching may run
// past the last row of a visit, into the next ego's.
template <class T>
struct NarrowRows {
  const T* base;
  int64_t channels;
  const int32_t* index;
  int64_t left;
  int64_t distance = prefetch_distance(channels * static_cast<int64_t>(sizeof(T)));

  DCGNN_INLINE const T* row(int64_t k) const { return base + int64_t{index[k]} * channels; }
  DCGNN_INLINE void prefetch(int64_t k) const {
    const int64_t ahead = k + distance;
    if (ahead < left) prefetch_row(row(ahead), channels);
  }
};

// The same for the entries begin, begin + 1, ... of any index array of index_end entries.
template <class T>
struct GatheredRows {
  const T* base;
  int64_t channels;
  IndexArray index;
  int64_t index_end;
  int64_t begin;

  DCGNN_INLINE const T* row(int64_t k) const { return base + index[begin + k] * channels; }
  DCGNN_INLINE void prefetch(int64_t k) const {
    const int64_t ahead = k + prefetch_distance(channels * static_cast<int64_t>(sizeof(T)));
    if (begin + ahead < index_end) prefetch_row(row(ahead), channels);
  }
  GatheredRows from(int64_t k) const { return {base, channels, index, index_end, begin + k}; }

  // visit(rows): a loop of its own for 32-bit numbers, which nearly every graph has. By value: a
  // copy of its own stays in registers.
  template <class Visit>
  DCGNN_INLINE void narrowed(const Visit& visit) const {
    if (const int32_t* entries = index.narrow()) {
      visit(NarrowRows<T>{base, channels, entries + begin, index_end - begin});
    } else {
      visit(*this);
    }
  }
};

// The rows 0 .. count - 1.
template <class T>
GatheredRows<T> consecutive_rows(const T* base, int64_t channels, int64_t count) {
  return {base, channels, IndexArray{}, count, 0};
}

// Sums over the channels of a row z, with kVectors vectors of the same width; sum c is at
// sums[c * kStep]:
template <int NC>
struct SquaredDistances {  // |z - a_c|^2
  static constexpr int kVectors = NC, kSums = NC;
  template <int kStep, class V>
  static DCGNN_INLINE void add(V* sums, V z, const V* a) {
    for (int c = 0; c < NC; ++c) {
      const V difference = z - a[c];
      sums[c * kStep] += difference * difference;
    }
  }
};
template <int NC>
struct Dots {  // z . a_c
  static constexpr int kVectors = NC, kSums = NC;
  template <int kStep, class V>
  static DCGNN_INLINE void add(V* sums, V z, const V* a) {
    for (int c = 0; c < NC; ++c) sums[c * kStep] += z * a[c];
  }
};
struct CentredDot {  // (z - a_0) . a_1
  static constexpr int kVectors = 2, kSums = 1;
  template <int kStep, class V>
  static DCGNN_INLINE void add(V* sums, V z, const V* a) {
    sums[0] += (z - a[0]) * a[1];
  }
};
struct CentredSquareAndDot {  // |z - a_0|^2 and (z - a_0) . a_1
  static constexpr int kVectors = 2, kSums = 2;
  template <int kStep, class V>
  static DCGNN_INLINE void add(V* sums, V z, const V* a) {
    const V difference = z - a[0];
    sums[0] += difference * difference;
    sums[kStep] += difference * a[1];
  }
};

// out[c * stride + k] = sum c of row k. The rows go eight sums at a time through the same
// instructions, the last row repeated, so that equal rows give equal bits wherever they stand; a
// column has room for a count rounded up to kPaddedRows. kRows: so many rows at a time.
template <class Sums, bool kPrefetch, int kRows = 8 / Sums::kSums, class T, class V, class A>
void reduce_rows(const GatheredRows<T>& all_rows, int64_t count, const V* vectors, A* out,
                 int64_t stride) {
  constexpr int NC = Sums::kSums;
  all_rows.narrowed([=](const auto rows) {
    const int64_t channels = rows.channels, whole = channels / kLanes<A> * kLanes<A>;
    const int tail = static_cast<int>(channels - whole);
    for (int64_t k = 0; k < count; k += kRows) {
      const T* row[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const int64_t index = k + r < count ? k + r : count - 1;
        if (kPrefetch) rows.prefetch(index);
        row[r] = rows.row(index);
      }
      Vec<A> sums[8] = {};  // [c][row]
      const auto add = [&](const auto& slice) {
#pragma GCC unroll 2
        for (int v = 0; v < std::decay_t<decltype(slice)>::kVectors; ++v) {
          Vec<A> fixed[Sums::kVectors];
          for (int c = 0; c < Sums::kVectors; ++c) fixed[c] = slice.load(vectors + c * channels, v);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            Sums::template add<kRows>(sums + r, slice.load(row[r], v), fixed);
          }
        }
      };
      int64_t first = 0;
      if constexpr (kIsBFloat16<T> || kIsBFloat16<V>) {
        for (; first + kLanes<A> < whole; first += 2 * kLanes<A>) add(FullSlice<A, 2>{first});
      }
      for (; first < whole; first += kLanes<A>) add(FullSlice<A, 1>{first});
      if (tail > 0) add(TailSlice<A>{whole, tail});
      A totals[8];
      reduce_add_eight<A>(sums, totals);
      for (int c = 0; c < NC; ++c) {
        std::memcpy(out + c * stride + k, totals + c * kRows, sizeof(A) * kRows);
      }
    }
  });
}

// Where rows are visited several times, so many at a time, which the nearest cache holds.
constexpr int64_t kCachedRows = 128;

// The same for any number of vectors, four, two or one at a time. Only the first visit prefetches.
template <template <int> class Sums, bool kPrefetch, class Rows, class V, class A>
void reduce_rows_by_all(const Rows& rows, int64_t count, const V* vectors, int64_t num_vectors,
                        A* out, int64_t stride) {
  for (int64_t from = 0; from < count; from += kCachedRows) {
    const Rows some = rows.from(from);
    const int64_t size = count - from < kCachedRows ? count - from : kCachedRows;
    int64_t c = 0;
    const auto part = [&](auto number) {
      using Part = Sums<decltype(number)::value>;
      const V* a = vectors + c * rows.channels;
      A* columns = out + c * stride + from;
      if (kPrefetch && c == 0) {
        reduce_rows<Part, true>(some, size, a, columns, stride);
      } else {
        reduce_rows<Part, false>(some, size, a, columns, stride);
      }
      c += decltype(number)::value;
    };
    while (num_vectors - c >= 4) part(std::integral_constant<int, 4>{});
    if (num_vectors - c >= 2) part(std::integral_constant<int, 2>{});
    if (num_vectors - c >= 1) part(std::integral_constant<int, 1>{});
  }
}

// sums = rows 0 .. count - 1 without the row `skip`, which counts 0 times rather than being jumped
// over: where it stands is not foreseeable.
template <class T, class A>
void sum_rows(const GatheredRows<T>& all_rows, int64_t count, const T* skip, A* sums) {
  const A counts[2] = {1, 0};
  all_rows.narrowed([=](const auto rows) {
    for_each_slice<A, kSliceVectors>(rows.channels, [=](auto slice) {
      constexpr int NV = decltype(slice)::kVectors;
      Vec<A> acc[NV] = {};
      for (int64_t k = 0; k < count; ++k) {
        if (slice.first == 0) rows.prefetch(k);
        const T* row = rows.row(k);
        const A times = counts[row == skip];
        for (int v = 0; v < NV; ++v) acc[v] += times * slice.load(row, v);
      }
      for (int v = 0; v < NV; ++v) slice.store(sums, v, acc[v]);
    });
  });
}

// sums = sum of row_k - centre, which is exactly 0 where all rows are the centre.
template <class T, class A>
void sum_differences(const GatheredRows<T>& all_rows, int64_t count, const T* centre, A* sums) {
  all_rows.narrowed([=](const auto rows) {
    for_each_slice<A, kSliceVectors>(rows.channels, [=](auto slice) {
      constexpr int NV = decltype(slice)::kVectors;
      Vec<A> acc[NV] = {};
      for (int64_t k = 0; k < count; ++k) {
        if (slice.first == 0) rows.prefetch(k);
        const T* row = rows.row(k);
        for (int v = 0; v < NV; ++v) acc[v] += slice.load(row, v) - slice.load(centre, v);
      }
      for (int v = 0; v < NV; ++v) slice.store(sums, v, acc[v]);
    });
  });
}

// sums[c * F + f] = sum_k weights[c * stride + k] (row_k[f] - centres[c * F + f]); not kCentred:
// centres 0. kAdd: onto what sums hold.
template <int NC, bool kCentred, bool kAdd = false, class T, class V, class A>
void weighted_sums(const GatheredRows<T>& all_rows, int64_t count, const A* weights, int64_t stride,
                   const V* centres, A* sums) {
  all_rows.narrowed([=](const auto rows) {
    const int64_t channels = rows.channels;
    for_each_slice<A, kSliceVectors / NC>(channels, [=](auto slice) {
      constexpr int NV = decltype(slice)::kVectors;
      Vec<A> acc[NC][NV] = {};
      for (int c = 0; kAdd && c < NC; ++c) {
        for (int v = 0; v < NV; ++v) acc[c][v] = slice.load(sums + c * channels, v);
      }
      for (int64_t k = 0; k < count; ++k) {
        const T* row = rows.row(k);
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
  });
}

// The same for any number of weight columns, two or one at a time.
template <bool kCentred, class Rows, class T, class A>
void weighted_sums_of_all(const Rows& rows, int64_t count, const A* weights, int64_t stride,
                          int64_t num_columns, const T* centres, A* sums) {
  const int64_t channels = rows.channels;
  for (int64_t from = 0; from < count || from == 0; from += kCachedRows) {
    const Rows some = rows.from(from);
    const int64_t size = count - from < kCachedRows ? count - from : kCachedRows;
    int64_t c = 0;
    const auto part = [&](auto number) {
      constexpr int NC = decltype(number)::value;
      const T* centre = kCentred ? centres + c * channels : nullptr;
      const A* columns = weights + c * stride + from;
      if (from == 0) {
        weighted_sums<NC, kCentred>(some, size, columns, stride, centre, sums + c * channels);
      } else {
        weighted_sums<NC, kCentred, true>(some, size, columns, stride, centre, sums + c * channels);
      }
      c += NC;
    };
    while (num_columns - c >= 2) part(std::integral_constant<int, 2>{});
    if (num_columns - c >= 1) part(std::integral_constant<int, 1>{});
  }
}

}  // namespace dcgnn::cpu::DCGNN_ISA
