// The dense map X W^T + b of many rows, and the sum of outer products g_n x_n^T that is the
// gradient of its weight.
//
// Both compute tiles of kTileRows rows and two vectors that stay in registers: every number of the
// rows is one broadcast for two multiplications of vectors. What a row gives does not depend on its
// place in a tile. Sums over rows are taken in blocks, the blocks of a part in order and the parts
// in order; parts depend on the shape alone.
#include "rows.h"
#include "segments.h"
#include "tables.h"

namespace dcgnn::cpu::DCGNN_ISA {
namespace {

// 12 accumulators, which fit into 16 registers, or 24 into the 32 of AVX-512.
constexpr int kTileRows = kVectorBytes == 64 ? 12 : 6;
template <class A>
constexpr int64_t kPanel = 2 * kLanes<A>;

int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// tile[r] = sum_k left(k, r) right_k, r < kTileRows, over kPanel numbers from right + k * stride.
template <class A, class Left>
DCGNN_INLINE void multiply_tile(int64_t count, const Left& left, const A* right, int64_t stride,
                                Vec<A> (&tile)[kTileRows][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < kTileRows; ++r) tile[r][0] = tile[r][1] = Vec<A>{};
  for (int64_t k = 0; k < count; ++k, right += stride) {
    const Vec<A> first = load(right), second = load(right + kLanes<A>);
#pragma GCC unroll 12
    for (int r = 0; r < kTileRows; ++r) {
      const A value = left(k, r);
      tile[r][0] += value * first;
      tile[r][1] += value * second;
    }
  }
}

// Rows as numbers to compute with: bfloat16 is copied.
template <class T>
const Acc<T>* computable(const T* rows, int64_t count, Buffer<Acc<T>>& copy) {
  if constexpr (kIsBFloat16<T>) {
    float* to = copy.reserve(count);
    int64_t k = 0;
    for (; k + kLanes<float> <= count; k += kLanes<float>) store(to + k, load(rows + k));
    for (; k < count; ++k) to[k] = to_acc(rows[k]);
    return to;
  } else {
    return rows;
  }
}

// Rows of `wide` numbers, those past `channels` 0: copied unless they are so already.
template <class T>
const Acc<T>* widened(const T* rows, int64_t count, int64_t channels, int64_t wide,
                      Buffer<Acc<T>>& copy) {
  if (wide == channels) return computable(rows, count * channels, copy);
  Acc<T>* to = copy.reserve(count * wide);
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t k = 0; k < wide; ++k) {
      to[n * wide + k] = k < channels ? to_acc(rows[n * channels + k]) : Acc<T>(0);
    }
  }
  return to;
}

// packed[panel][k][kPanel] = weight[panel * kPanel ..][k], the last panel filled up with 0.
template <class T>
void pack_weight(const LinearForward& call, Acc<T>* packed) {
  using A = Acc<T>;
  const T* weight = static_cast<const T*>(call.weight);
  for (int64_t from = 0; from < call.outputs; from += kPanel<A>) {
    const int64_t live = smaller(kPanel<A>, call.outputs - from);
    for (int64_t k = 0; k < call.inputs; ++k, packed += kPanel<A>) {
      const T* column = weight + from * call.weight_strides[0] + k * call.weight_strides[1];
      for (int64_t o = 0; o < kPanel<A>; ++o) {
        packed[o] = o < live ? to_acc(column[o * call.weight_strides[0]]) : A(0);
      }
    }
  }
}

// Rows that a panel of weights is used for at a time: as many as the nearest cache holds, or, when
// the weights themselves are larger than the second one, so many that reading them does not count.
template <class A>
int64_t rows_at_once(const LinearForward& call) {
  constexpr int64_t kNearNumbers = (1 << 14) / sizeof(A), kFarNumbers = (1 << 19) / sizeof(A);
  constexpr int64_t kMany = 96 / kTileRows * kTileRows;
  if (call.inputs * call.outputs > kFarNumbers) return kMany;
  const int64_t rows = kNearNumbers / (call.inputs > 0 ? call.inputs : 1);
  return rows < kTileRows ? kTileRows : smaller(rows / kTileRows * kTileRows, kMany);
}

template <class T>
void run_forward(const LinearForward& call, const Executor& executor) {
  using A = Acc<T>;
  constexpr int64_t kLongTask = 768, kShortTask = 96;
  const int64_t task_rows = call.rows >= 64 * kLongTask ? kLongTask : kShortTask;
  const int64_t inputs = call.inputs, outputs = call.outputs;
  const T* x = static_cast<const T*>(call.x);
  const T* bias = static_cast<const T*>(call.bias);
  const auto out = output_rows<T>(call.out, call.rows, outputs);
  const int64_t padded = round_up(outputs, kPanel<A>);
  Buffer<A> weight_buffer, bias_buffer;
  A* weight = weight_buffer.reserve(padded * inputs);
  pack_weight<T>(call, weight);
  A* shift = bias_buffer.reserve(padded);
  for (int64_t o = 0; o < padded; ++o) {
    shift[o] = bias != nullptr && o < outputs ? to_acc(bias[o]) : A(0);
  }
  const int64_t step = rows_at_once<A>(call);
  executor.run((call.rows + task_rows - 1) / task_rows, [&](int64_t begin, int64_t end) {
    Buffer<A> copy;
    const int64_t last = smaller(end * task_rows, call.rows);
    for (int64_t from = begin * task_rows; from < last; from += step) {
      const int64_t count = smaller(step, last - from);
      const A* rows = computable(x + from * inputs, count * inputs, copy);
      for (int64_t o = 0; o < outputs; o += kPanel<A>) {
        const A* panel = weight + o * inputs;
        const Vec<A> shifts[2] = {load(shift + o), load(shift + o + kLanes<A>)};
        for (int64_t n = 0; n < count; n += kTileRows) {
          const A* row[kTileRows];
          for (int r = 0; r < kTileRows; ++r) row[r] = rows + smaller(n + r, count - 1) * inputs;
          Vec<A> tile[kTileRows][2];
          multiply_tile<A>(
              inputs, [&](int64_t k, int r) { return row[r][k]; }, panel, kPanel<A>, tile);
          const int64_t live = smaller(kTileRows, count - n);
#pragma GCC unroll 12
          for (int r = 0; r < kTileRows; ++r) {
            if (r >= live) break;
            T* to = out.data + (from + n + r) * outputs + o;
            for (int v = 0; v < 2; ++v) {
              const Vec<A> value = tile[r][v] + shifts[v];
              const int64_t left = outputs - o - v * kLanes<A>;
              if (out.streamed && !kIsBFloat16<T> && left >= kLanes<A>) {
                stream(to + v * kLanes<A>, value);
              } else {
                store_some(to + v * kLanes<A>, value, left);
              }
            }
          }
        }
      }
    }
    stream_fence();
  });
}

// packed[panel][n][kPanel] = rows[n][panel * kPanel ..], the last panel filled up with 0.
template <class T>
const Acc<T>* pack_rows(const T* rows, int64_t count, int64_t channels, Acc<T>* packed) {
  using A = Acc<T>;
  A* to = packed;
  for (int64_t from = 0; from < channels; from += kPanel<A>) {
    const T* row = rows + from;
    const int64_t live = smaller(kPanel<A>, channels - from);
    for (int64_t n = 0; n < count; ++n, row += channels, to += kPanel<A>) {
      if (live == kPanel<A>) {
        store(to, load(row));
        store(to + kLanes<A>, load(row + kLanes<A>));
      } else {
        for (int64_t c = 0; c < kPanel<A>; ++c) to[c] = c < live ? to_acc(row[c]) : A(0);
      }
    }
  }
  return packed;
}

// sums[a][b] += sum of left[n][a] right[n][b] over some rows, for at least kTileRows lefts and
// packed rights.
template <class A>
void add_outer_products(int64_t rows, const A* left, int64_t lefts, const A* right, int64_t rights,
                        A* sums) {
  for (int64_t b = 0; b < rights; b += kPanel<A>) {
    for (int64_t a = 0; a < lefts; a += kTileRows) {
      // The last tile ends with the last column, and leaves out what an earlier one has added.
      const int64_t first = smaller(a, lefts - kTileRows);
      const A* column = left + first;
      Vec<A> tile[kTileRows][2];
      multiply_tile<A>(
          rows, [&](int64_t n, int r) { return column[n * lefts + r]; }, right + b * rows,
          kPanel<A>, tile);
#pragma GCC unroll 12
      for (int r = 0; r < kTileRows; ++r) {
        if (first + r < a) continue;
        A* to = sums + (first + r) * rights + b;
        store(to, load(to) + tile[r][0]);
        store(to + kLanes<A>, load(to + kLanes<A>) + tile[r][1]);
      }
    }
  }
}

template <class T>
void run_outer(const OuterProducts& call, const Executor& executor) {
  using A = Acc<T>;
  constexpr int64_t kBlock = 64, kFewest = 16 * kBlock, kMostParts = 64, kMostNumbers = 1 << 24;
  const int64_t lefts = call.lefts < kTileRows ? kTileRows : call.lefts;
  const int64_t rights = round_up(call.rights, kPanel<A>);
  const int64_t size = lefts * rights;
  const int64_t fitting = size > 0 ? kMostNumbers / size : kMostParts;
  const int64_t most_parts = fitting < 1 ? 1 : smaller(fitting, kMostParts);
  const int64_t by_parts = round_up((call.rows + most_parts - 1) / most_parts, kBlock);
  const int64_t part_rows = by_parts > kFewest ? by_parts : kFewest;
  const int64_t num_parts = call.rows == 0 ? 1 : (call.rows + part_rows - 1) / part_rows;
  Buffer<A> buffer;
  A* sums = buffer.reserve(num_parts * size);
  executor.run(num_parts, [&](int64_t begin, int64_t end) {
    Buffer<A> left_copy, right_copy;
    for (int64_t part = begin; part < end; ++part) {
      A* own = sums + part * size;
      for (int64_t k = 0; k < size; ++k) own[k] = 0;
      const int64_t last = smaller((part + 1) * part_rows, call.rows);
      for (int64_t from = part * part_rows; from < last; from += kBlock) {
        const int64_t count = smaller(kBlock, last - from);
        const T* left = static_cast<const T*>(call.left) + from * call.lefts;
        const T* right = static_cast<const T*>(call.right) + from * call.rights;
        add_outer_products(
            count, widened(left, count, call.lefts, lefts, left_copy), lefts,
            pack_rows(right, count, call.rights, right_copy.reserve(kBlock * rights)), rights, own);
      }
    }
  });
  for (int64_t part = 1; part < num_parts; ++part) {
    for (int64_t k = 0; k < size; ++k) sums[k] += sums[part * size + k];
  }
  T* out = static_cast<T*>(call.out);
  for (int64_t a = 0; a < call.lefts; ++a) {
    for (int64_t b = 0; b < call.rights; ++b) *out++ = from_acc<T>(sums[a * rights + b]);
  }
}

}  // namespace

void linear(const LinearForward& call, const Executor& executor) {
  with_storage(call.dtype, [&](auto storage) { run_forward<decltype(storage)>(call, executor); });
}

void outer_products(const OuterProducts& call, const Executor& executor) {
  with_storage(call.dtype, [&](auto storage) { run_outer<decltype(storage)>(call, executor); });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
