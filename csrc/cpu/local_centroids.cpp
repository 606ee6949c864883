// Where the local cluster-nodes start: the node itself and the means of K - 1 groups of its
// neighbours, dealt out in turn (neighbour p of the ascending list is in group p mod (K - 1)); K =
// 1: the mean of the ego. An empty group takes the mean of all neighbours, or the node itself if
// there are none. Means are taken of differences to the node: rows that are all equal give
// centroids that are equal to the bit, so that their distance is 0 and not rounding, which a cost
// scale would divide by itself. The mean of one row is that row, for the same reason.
//
// Forward is a gather over the egos, backward one over the transpose: a node gets from every ego
// that holds it the gradient of its group, divided by the group's size, and a share of the empty
// groups' gradients.
#include "segments.h"
#include "tables.h"

namespace dcgnn::cpu::DCGNN_ISA {
namespace {

// How an ego deals its neighbours out.
struct Deal {
  int64_t neighbours, groups;  // groups = K - 1
  int64_t size(int64_t group) const {
    return group < neighbours ? (neighbours - group + groups - 1) / groups : 0;
  }
  // What is taken off the rows of a group before they are summed; null: nothing.
  template <class T>
  const T* origin(int64_t group, const T* own) const {
    return size(group) == 1 ? nullptr : own;
  }
};

template <class T, class Slice>
auto load_or_zero(const Slice& slice, const T* row, int v) {
  return row == nullptr ? Vec<Acc<T>>{} : slice.load(row, v);
}

template <class T>
void write_scaled(T* out, const T* origin, const Acc<T>* values, Acc<T> factor, int64_t channels) {
  using A = Acc<T>;
  for_each_slice<A, 2>(channels, [&](auto slice) {
    slice.write(out, [&](int v) {
      return load_or_zero(slice, origin, v) + slice.load(values, v) * factor;
    });
  });
}

template <class T>
void run_forward(const CentroidsForward& call, const Executor& executor) {
  using A = Acc<T>;
  const GraphView graph(*call.graph);
  const int64_t clusters = call.num_clusters, channels = call.channels, groups = clusters - 1;
  const IndexArray rowptr = graph.rowptr;
  const IndexArray member = graph.member;
  const T* z = static_cast<const T*>(call.z);
  const GatheredRows<T> all_rows{z, channels, member, graph.num_slots, 0};

  // The sums of every group's rows, without their origin, over the slots [begin, end) of an ego; K
  // = 1: the sum of the whole ego.
  const auto sum_block = [&](int64_t ego, int64_t begin, int64_t end, A* sums) {
    const GatheredRows<T> rows = all_rows.from(begin);
    const T* own = z + ego * channels;
    if (groups == 0) {
      sum_rows(rows, end - begin, static_cast<const T*>(nullptr), sums);
      return;
    }
    const Deal deal{rowptr[ego + 1] - rowptr[ego] - 1, groups};
    if (groups == 1 && deal.neighbours > 1) {
      sum_differences(rows, end - begin, own, sums);
      return;
    }
    for (int64_t f = 0; f < groups * channels; ++f) sums[f] = 0;
    for (int64_t k = begin; k < end; ++k) {
      rows.prefetch(k - begin);
      if (member[k] == ego) continue;
      const int64_t position = k - rowptr[ego] - (member[k] > ego ? 1 : 0);
      const int64_t group = position % groups;
      A* sum = sums + group * channels;
      const T* row = rows.row(k - begin);
      const T* origin = deal.origin(group, own);
      for_each_slice<A, 2>(channels, [&](auto slice) {
        slice.write(sum, [&](int v) {
          return slice.load(sum, v) + (slice.load(row, v) - load_or_zero(slice, origin, v));
        });
      });
    }
  };
  const auto write = [&](int64_t ego, A* sums) {
    T* out = static_cast<T*>(call.centroids) + ego * clusters * channels;
    const int64_t size = rowptr[ego + 1] - rowptr[ego];
    if (groups == 0) {
      write_scaled(out, static_cast<const T*>(nullptr), sums, A(1) / static_cast<A>(size),
                   channels);
      return;
    }
    const T* own = z + ego * channels;
    for (int64_t f = 0; f < channels; ++f) out[f] = own[f];
    const Deal deal{size - 1, groups};
    for (int64_t group = 0; group < groups; ++group) {
      T* row = out + (group + 1) * channels;
      if (deal.size(group) > 0) {
        write_scaled(row, deal.origin(group, own), sums + group * channels,
                     A(1) / static_cast<A>(deal.size(group)), channels);
      } else if (deal.neighbours <= 1) {
        const T* only = deal.neighbours == 1 ? out + channels : own;
        for (int64_t f = 0; f < channels; ++f) row[f] = only[f];
      } else {  // groups without a member come last, and those before have one member each
        for_each_slice<A, 2>(channels, [&](auto slice) {
          slice.write(row, [&](int v) {
            Vec<A> sum = {};
            for (int64_t other = 0; other < deal.neighbours; ++other) {
              sum += slice.load(sums + other * channels, v) - slice.load(own, v);
            }
            return slice.load(own, v) + sum / static_cast<A>(deal.neighbours);
          });
        });
      }
    }
  };
  sum_segment_blocks<A>(rowptr, graph.num_nodes, (groups > 0 ? groups : 1) * channels, executor,
                        sum_block, write);
}

template <class T>
void run_backward(const CentroidsBackward& call, const Executor& executor) {
  using A = Acc<T>;
  const GraphView graph(*call.graph);
  const int64_t clusters = call.num_clusters, channels = call.channels, groups = clusters - 1;
  const int64_t width = clusters * channels;
  const IndexArray rowptr = graph.rowptr;
  const T* grad = static_cast<const T*>(call.grad);
  const auto fetch = [=](int64_t ego, int64_t) {
    const T* rows = grad + ego * width;
    prefetch_row(groups > 0 ? rows + channels : rows, channels);
  };
  const TransposeEntries<IndexArray, std::decay_t<decltype(fetch)>> entries{
      graph.ego, graph.slot, graph.num_slots, fetch,
      prefetch_distance(channels * static_cast<int64_t>(sizeof(T)))};
  const auto sum_block = [&](int64_t node, int64_t begin, int64_t end, A* sums) {
    for_each_slice<A, kSliceVectors>(channels, [&](auto slice) {
      constexpr int NV = decltype(slice)::kVectors;
      Vec<A> acc[NV] = {};
      const auto add = [&](int64_t row, A factor) {
        for (int v = 0; v < NV; ++v) acc[v] += factor * slice.load(grad + row * channels, v);
      };
      for (int64_t k = begin; k < end; ++k) {
        if (slice.first == 0) entries.prefetch(k);
        const int64_t ego = entries.problem(k);
        const int64_t size = rowptr[ego + 1] - rowptr[ego];
        const Deal deal{size - 1, groups};
        const int64_t first = ego * clusters;
        if (groups == 0) {
          add(first, A(1) / static_cast<A>(size));
        } else if (ego == node) {
          add(first, A(1));
          for (int64_t group = 0; deal.neighbours == 0 && group < groups; ++group) {
            add(first + 1 + group, A(1));
          }
        } else {
          const int64_t position = entries.slot(k) - rowptr[ego] - (node > ego ? 1 : 0);
          const int64_t group = position % groups;
          add(first + 1 + group, A(1) / static_cast<A>(deal.size(group)));
          for (int64_t empty = deal.neighbours; empty < groups; ++empty) {
            add(first + 1 + empty, A(1) / static_cast<A>(deal.neighbours));
          }
        }
      }
      for (int v = 0; v < NV; ++v) slice.store(sums, v, acc[v]);
    });
  };
  sum_segments(graph.colptr, graph.num_nodes, channels, static_cast<T*>(call.grad_z), executor,
               sum_block);
}

}  // namespace

void local_centroids(const CentroidsForward& call, const Executor& executor) {
  with_storage(call.dtype, [&](auto storage) { run_forward<decltype(storage)>(call, executor); });
}

void local_centroids_backward(const CentroidsBackward& call, const Executor& executor) {
  with_storage(call.dtype, [&](auto storage) { run_backward<decltype(storage)>(call, executor); });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
