// One transport problem from rows to clusters, and back, for any K but 2 (see pair_transport.h).
//
// Forward: costs (the one visit that prefetches), Sinkhorn on the logits in cache, assign = P and
// clusters_j = sum_u K P_uj z_u from rows that the first visit brought in.
// Backward: costs again, dP_uj = grad_assign_uj + K z_u . grad_clusters_j, the Sinkhorn gradient,
// then grad_centroids_j = sum_u 2 dM_uj (c_j - z_u) and the gradients of the rows: where a row is
// in no other problem as rows of grad_z, else, for the gather over the transpose that makes grad_z,
// as 2 K coefficients a slot: K P_u1 .. K P_uK, 2 dM_u1 .. 2 dM_uK.
#pragma once

#include "converge.h"
#include "cost.h"
#include "log_sinkhorn.h"
#include "rows.h"

namespace dcgnn::cpu::DCGNN_ISA {

// Where a backward leaves the gradients of a problem's rows: as coefficients, for rows that other
// problems share, or as the rows of a matrix.
template <class T>
struct RowGradients {
  Acc<T>* coefficients;
  OutputRows<T> rows;
};

// The rows of `out`, one for each row u: sum_j K P_uj grad_clusters_j + 2 dM_uj (z_u - c_j), from
// the columns of a block.
template <bool kClusters, class T>
void write_row_gradients(const GatheredRows<T>& rows, int64_t count, int64_t num_clusters,
                         const Acc<T>* weights, const Acc<T>* slopes, int64_t stride,
                         const T* centroids, const T* grad_clusters, const OutputRows<T>& out) {
  using A = Acc<T>;
  constexpr int kRows = 2;  // at a time: they share what is loaded of centroids and gradients
  const int64_t channels = rows.channels;
  for (int64_t u = 0; u < count; u += kRows) {
    const int64_t at[kRows] = {u, u + 1 < count ? u + 1 : u};
    const T* row[kRows] = {rows.row(at[0]), rows.row(at[1])};
    for_each_slice<A, 4>(channels, [&](auto slice) {
      constexpr int NV = decltype(slice)::kVectors;
      Vec<A> acc[kRows][NV] = {};
      const T* centroid = centroids;
      const T* gradient = grad_clusters;
      for (int64_t j = 0; j < num_clusters; ++j, centroid += channels) {
        for (int v = 0; v < NV; ++v) {
          const Vec<A> c = slice.load(centroid, v);
          for (int r = 0; r < kRows; ++r) {
            acc[r][v] += slopes[j * stride + at[r]] * (slice.load(row[r], v) - c);
          }
        }
        if constexpr (kClusters) {
          for (int v = 0; v < NV; ++v) {
            const Vec<A> g = slice.load(gradient, v);
            for (int r = 0; r < kRows; ++r) acc[r][v] += weights[j * stride + at[r]] * g;
          }
          gradient += channels;
        }
      }
      for (int r = 0; r < kRows; ++r) {
        slice.write(out + at[r] * channels, [&](int v) { return acc[r][v]; });
      }
    });
  }
}

template <class T>
class TransportSolver {
 public:
  using A = Acc<T>;
  using Rows = GatheredRows<T>;

  TransportSolver(const Transport& transport, const Executor& executor)
      : transport_(transport), problem_(transport, executor) {}

  // False when a cost is not finite.
  bool forward(const Rows& rows, int64_t num_rows, const T* centroids, T* assign, T* clusters,
               A* potentials) {
    problem_.reset(num_rows, /*backward=*/false);
    const auto nothing = [](int64_t) {};
    if (!fill_logits<false>(problem_, rows, centroids, nothing).finite) return false;
    if (transport_.num_iters == 0) {
      log_converge(problem_, potentials, scratch_, system_);
    } else {
      log_forward(problem_, potentials, scratch_);
    }
    write_forward(rows, assign, clusters);
    return true;
  }

  // grad_assign and grad_clusters may be null.
  void backward(const Rows& rows, int64_t num_rows, const T* centroids, const A* potentials,
                const T* grad_assign, const T* grad_clusters, const RowGradients<T>& row_gradients,
                T* grad_centroids) {
    problem_.reset(num_rows, /*backward=*/true);
    const CostState<A> state = fill_logits<true>(problem_, rows, centroids, [&](int64_t block) {
      fill_assign_gradient(rows, block, grad_assign, grad_clusters);
    });
    if (transport_.num_iters == 0) {
      log_converged_backward(problem_, potentials, scratch_, system_);
    } else {
      log_backward(problem_, potentials, scratch_);
    }
    write_backward(rows, centroids, grad_clusters, state, row_gradients, grad_centroids);
  }

 private:
  void write_forward(const Rows& rows, T* assign, T* clusters) {
    const int64_t num_clusters = transport_.num_clusters, channels = transport_.channels;
    const int64_t width = num_clusters * channels, stride = problem_.stride();
    const A inverse_clusters = A(1) / static_cast<A>(num_clusters);
    A* sums = sums_.reserve(width);
    problem_.sum_blocks(width, sums, [&](int64_t block, A* partial) {
      const int64_t count = problem_.block_rows(block);
      const A* weights = problem_.logits(block);
      T* out = assign + block * kBlockRows * num_clusters;
      for (int64_t u = 0; u < count; ++u) {
        for (int64_t j = 0; j < num_clusters; ++j) {
          out[u * num_clusters + j] = from_acc<T>(weights[j * stride + u] * inverse_clusters);
        }
      }
      weighted_sums_of_all<false>(rows.from(block * kBlockRows), count, weights, stride,
                                  num_clusters, static_cast<const T*>(nullptr), partial);
    });
    write_rows(clusters, sums, num_clusters, channels);
  }

  // values = dP, the whole gradient of the plan.
  void fill_assign_gradient(const Rows& rows, int64_t block, const T* grad_assign,
                            const T* grad_clusters) {
    const int64_t num_clusters = transport_.num_clusters, stride = problem_.stride();
    const A factor = static_cast<A>(num_clusters);
    const int64_t count = problem_.block_rows(block);
    A* values = problem_.values(block);
    if (grad_clusters != nullptr) {
      reduce_rows_by_all<Dots, false>(rows.from(block * kBlockRows), count, grad_clusters,
                                      num_clusters, values, stride);
    }
    const T* given =
        grad_assign == nullptr ? nullptr : grad_assign + block * kBlockRows * num_clusters;
    for (int64_t j = 0; j < num_clusters; ++j) {
      for (int64_t u = 0; u < count; ++u) {
        const A through = grad_clusters == nullptr ? A(0) : factor * values[j * stride + u];
        values[j * stride + u] =
            through + (given == nullptr ? A(0) : to_acc(given[u * num_clusters + j]));
      }
    }
  }

  void write_backward(const Rows& rows, const T* centroids, const T* grad_clusters,
                      const CostState<A>& state, const RowGradients<T>& row_gradients,
                      T* grad_centroids) {
    const int64_t num_clusters = transport_.num_clusters, channels = transport_.channels;
    const int64_t width = num_clusters * channels, stride = problem_.stride();
    const CostGradient<A> cost_gradient(problem_, state);
    A* sums = sums_.reserve(width);
    problem_.sum_blocks(width, sums, [&](int64_t block, A* partial) {
      const int64_t from = block * kBlockRows, count = problem_.block_rows(block);
      cost_gradient.apply(block);
      const A* weights = problem_.weights(block);
      const A* values = problem_.values(block);
      weighted_sums_of_all<true>(rows.from(from), count, values, stride, num_clusters, centroids,
                                 partial);
      if (row_gradients.coefficients != nullptr) {
        A* out = row_gradients.coefficients + from * 2 * num_clusters;
        for (int64_t u = 0; u < count; ++u) {
          for (int64_t j = 0; j < num_clusters; ++j) {
            out[u * 2 * num_clusters + j] = weights[j * stride + u];
            out[(u * 2 + 1) * num_clusters + j] = values[j * stride + u];
          }
        }
      } else {
        const auto write =
            grad_clusters == nullptr ? write_row_gradients<false, T> : write_row_gradients<true, T>;
        write(rows.from(from), count, num_clusters, weights, values, stride, centroids,
              grad_clusters, row_gradients.rows + from * channels);
        stream_fence();
      }
    });
    for (int64_t f = 0; f < width; ++f) sums[f] = -sums[f];
    write_rows(grad_centroids, sums, num_clusters, channels);
  }

  const Transport& transport_;
  Problem<A> problem_;
  Buffer<A> scratch_, sums_;
  Buffer<double> system_;
};

extern template class TransportSolver<float>;
extern template class TransportSolver<double>;
extern template class TransportSolver<BFloat16>;

// grad_z_i = sum over the problems that hold node i of sum_j K P_ij grad_clusters_j + 2 dM_ij (z_i
// - c_j). `entries` gives the problem and the slot of entry k, and prefetches ahead.
template <bool kClusters, class T, class Entries>
void gather_node_gradient(const Entries& entries, int64_t begin, int64_t end, int64_t num_clusters,
                          int64_t channels, const Acc<T>* coefficients, const T* z_row,
                          const T* centroids, const T* grad_clusters, Acc<T>* out) {
  using A = Acc<T>;
  const int64_t width = num_clusters * channels;
  for_each_slice<A, kSliceVectors>(channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> acc[NV] = {}, z[NV];
    for (int v = 0; v < NV; ++v) z[v] = slice.load(z_row, v);
    for (int64_t k = begin; k < end; ++k) {
      if (slice.first == 0) entries.prefetch(k);
      const int64_t problem = entries.problem(k);
      const A* weight = coefficients + entries.slot(k) * 2 * num_clusters;
      const A* slope = weight + num_clusters;
      const T* centroid = centroids + problem * width;
      const T* gradient = kClusters ? grad_clusters + problem * width : nullptr;
      for (int64_t j = 0; j < num_clusters; ++j, centroid += channels, gradient += channels) {
        for (int v = 0; v < NV; ++v) {
          if constexpr (kClusters) acc[v] += weight[j] * slice.load(gradient, v);
          acc[v] += slope[j] * (z[v] - slice.load(centroid, v));
        }
      }
    }
    for (int v = 0; v < NV; ++v) slice.store(out, v, acc[v]);
  });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
