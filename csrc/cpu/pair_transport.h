// One transport problem with K = 2 from rows to clusters, and back.
//
// With d = c_2 - c_1 and e = z_u - c_1 a row needs e.d, and with a cost scale also |e|^2:
//   M_u1 = |e|^2,   M_u2 = |e|^2 - 2 e.d + |d|^2,   s_u = lam (M_u2 - M_u1) / scale.
// R_u1 + R_u2 = 1 in every row, so that the cluster with the larger sum S follows from the other,
//   S_max C_max = sum_u z_u - S_min C_min   (S_max >= n/2: no digits are lost),
// and a member's gradient is a combination of three rows of its problem, with Q_j = K P_j = R_j /
// S_j:
//   Q_1 dC_1 + Q_2 dC_2 = Q_min (dC_min - S_min/S_max dC_max) + dC_max / S_max
//   2 dM_u1 (z_u - c_1) + 2 dM_u2 (z_u - c_2) = -2 dM_u2 d + 2 (dM_u1 + dM_u2)(z_u - c_1),
// where dM_u1 + dM_u2 is 0 but for the gradient of a cost scale.
//
// Centroids that are not given start fresh: c_1 is the ego's own row, c_2 the mean of the others.
#pragma once

#include "cost.h"
#include "log_sinkhorn.h"
#include "pair_sinkhorn.h"

namespace dcgnn::cpu::DCGNN_ISA {

// Where a problem's centroids come from.
template <class T>
struct PairStart {
  const T* centroids;  // [2, F]; null: fresh
  const T* own;        // fresh: the ego's own row
};

// axis: c_1, d = c_2 - c_1 and the sum of the other rows, which is given.
template <class T, class A>
void fresh_axis(const T* own, int64_t num_rows, int64_t channels, A* axis) {
  const A share = num_rows > 1 ? A(1) / static_cast<A>(num_rows - 1) : A(0);
  for_each_slice<A, 2>(channels, [&](auto slice) {
    for (int v = 0; v < decltype(slice)::kVectors; ++v) {
      const Vec<A> first = slice.load(own, v);
      const Vec<A> mean = num_rows > 1 ? slice.load(axis + 2 * channels, v) * share : first;
      slice.store(axis, v, first);
      slice.store(axis + channels, v, mean - first);
    }
  });
}

// |d|^2 by the instructions that give a row's |e|^2: equal distances are equal bits.
template <class A>
A squared_length(const A* direction, int64_t channels) {
  A length;
  reduce_rows<Dots<1>, false, 1>(consecutive_rows(direction, channels, 1), 1, direction, &length,
                                 0);
  return length;
}

template <class A>
int smaller_cluster(const A (&sums)[2]) {
  return sums[0] < sums[1] ? 0 : 1;
}

// mean: the smaller cluster.
template <class T, class A>
void write_fresh_clusters(const A* mean, const A* neighbour_sum, const T* own, const A (&sums)[2],
                          int64_t channels, const OutputRows<T>& clusters) {
  const int small = smaller_cluster(sums), large = 1 - small;
  const A part = sums[small], inverse = A(1) / sums[large];
  for_each_slice<A, 2>(channels, [&](auto slice) {
    slice.write(clusters + small * channels, [&](int v) { return slice.load(mean, v); });
    slice.write(clusters + large * channels, [&](int v) {
      const Vec<A> total = slice.load(neighbour_sum, v) + slice.load(own, v);
      return (total - part * slice.load(mean, v)) * inverse;
    });
  });
}

// What one problem leaves for the gather over the transpose: kPairRows rows of the storage type,
//   U = dC_min - S_min/S_max dC_max,   d,   V = dC_max / S_max + (gradient of c_2) / (n - 1) if
//   fresh,
// for every slot Q_min and -2 dM_u2, and one number w: 2 (dM_u1 + dM_u2), which a cost scale gives
// to some slots, all the same to each of them. The sign of Q_min marks those slots.

// The gradient of a cost scale, as part of 2 dM.
template <class A>
struct PairScaleGradient {
  A everywhere = 0;
  A at_maximum = 0;
};

// grad_c1 = sum(v e) for v = 2 dM_u2 of all rows is given; `total` is sum(v).
template <class A>
void second_centroid_gradient(const A* direction, A total, int64_t channels, const A* grad_first,
                              A* grad_second) {
  for_each_slice<A, 2>(channels, [&](auto slice) {
    slice.write(grad_second, [&](int v) {
      return total * slice.load(direction, v) - slice.load(grad_first, v);
    });
  });
}

// What `everywhere` adds to the centroids' gradients; sum is that of e over all rows.
template <class A>
void add_mean_gradient(const A* direction, const A* sum, A everywhere, int64_t num_rows,
                       int64_t channels, A* grad_first, A* grad_second) {
  const A count = static_cast<A>(num_rows);
  for_each_slice<A, 2>(channels, [&](auto slice) {
    for (int v = 0; v < decltype(slice)::kVectors; ++v) {
      const Vec<A> e = slice.load(sum, v), d = slice.load(direction, v);
      slice.store(grad_first, v, slice.load(grad_first, v) - everywhere * e);
      slice.store(grad_second, v, slice.load(grad_second, v) + everywhere * (count * d - e));
    }
  });
}

// What `at_maximum` adds: to the slot's two coefficients, and to the gradient `out` of its
// centroid.
template <class A>
DCGNN_INLINE void add_maximum_coefficient(A at_maximum, int64_t cluster, A* coefficients) {
  if (cluster == 1) coefficients[1] = limit_gradient(coefficients[1] - at_maximum);
  coefficients[0] = -coefficients[0];
}
template <class T, class A>
void add_maximum_gradient(const T* row, const A* axis, int64_t cluster, A weight, int64_t channels,
                          A* out) {
  for_each_slice<A, 2>(channels, [&](auto slice) {
    slice.write(out, [&](int v) {
      Vec<A> centroid = slice.load(axis, v);
      if (cluster == 1) centroid += slice.load(axis + channels, v);
      return slice.load(out, v) + weight * (centroid - slice.load(row, v));
    });
  });
}

// Where the gradients of one problem's centroids go, and its rows of the table. A problem that
// starts fresh gives its own row `own_gradient` and passes the rest on through the table.
template <class T>
struct PairGradients {
  OutputRows<T> table;
  T* centroids;         // null: fresh
  T* own_gradient;      // fresh only
  bool own_is_started;  // own_gradient holds a part of the sum already

  template <class A>
  void write(const A* direction, const A* grad_first, const A* grad_second, const T* grad_clusters,
             const A (&sums)[2], int64_t num_rows, int64_t channels) const {
    const int small = smaller_cluster(sums), large = 1 - small;
    const bool fresh = centroids == nullptr;
    const A share = fresh && num_rows > 1 ? A(1) / static_cast<A>(num_rows - 1) : A(0);
    const A part = sums[small] / sums[large], inverse = A(1) / sums[large];
    for_each_slice<A, 2>(channels, [&](auto slice) {
      const auto of = [&](int cluster, int v) {
        return grad_clusters == nullptr ? Vec<A>{}
                                        : slice.load(grad_clusters + cluster * channels, v);
      };
      const auto first = [&](int v) { return slice.load(grad_first, v); };
      const auto second = [&](int v) { return slice.load(grad_second, v); };
      slice.write(table, [&](int v) { return of(small, v) - part * of(large, v); });
      slice.write(table + channels, [&](int v) { return slice.load(direction, v); });
      slice.write(table + 2 * channels,
                  [&](int v) { return inverse * of(large, v) + share * second(v); });
      if (fresh) {
        const A other = num_rows > 1 ? -share : A(1);
        slice.write(own_gradient, [&](int v) {
          const Vec<A> begun = own_is_started ? slice.load(own_gradient, v) : Vec<A>{};
          return begun + first(v) + other * second(v);
        });
      } else {
        slice.write(centroids, first);
        slice.write(centroids + channels, second);
      }
    });
  }
};

template <class T>
class PairSolver {
 public:
  using A = Acc<T>;
  using Rows = GatheredRows<T>;

  PairSolver(const Transport& transport, const Executor& executor)
      : transport_(transport), problem_(transport, executor) {}

  // False when a cost is not finite.
  bool forward(const Rows& rows, int64_t num_rows, const PairStart<T>& start, T* assign,
               const OutputRows<T>& clusters, A* potentials) {
    problem_.reset(num_rows, /*backward=*/false);
    find_axis(rows, start);
    const CostState<A> state = fill_logits<false>(rows);
    if (!state.finite) return false;
    A sums[2];
    if (transport_.num_iters == 0) {
      pair_converge(problem_, potentials, sums);
    } else if (state.peak <= kPairPeak<A>) {
      pair_forward(problem_, potentials, sums);
    } else {
      complete_logits();
      log_forward(problem_, potentials, scratch_);
      const PairHistory<A> past{potentials, static_cast<A>(num_rows)};
      for (int j = 0; j < 2; ++j) sums[j] = past.sum(transport_.num_iters - 1, j);
    }
    write_assign(assign);
    if (fresh_) {
      write_fresh(rows, start, sums, clusters);
    } else {
      write_clusters(rows, clusters);
    }
    return true;
  }

  // grad_assign and grad_clusters may be null.
  void backward(const Rows& rows, int64_t num_rows, const PairStart<T>& start, const A* potentials,
                const T* grad_assign, const T* grad_clusters, A* coefficients, A* scale_weight,
                const PairGradients<T>& gradients) {
    problem_.reset(num_rows, /*backward=*/true);
    find_axis(rows, start);
    const CostState<A> state = fill_logits<true>(rows);
    fill_plan_gradient(rows, grad_assign, grad_clusters);
    A sums[2];
    if (transport_.num_iters == 0) {
      pair_converged_backward(problem_, potentials, sums);
    } else if (state.peak <= kPairPeak<A>) {
      pair_backward(problem_, potentials, sums);
    } else {
      log_domain_backward(potentials, sums);
    }
    const ScaleGradient scale = scale_gradient(state);
    const int64_t channels = transport_.channels;
    A* grad_first = sums_.reserve(3 * channels);  // gradients of c_1 and c_2
    A* grad_second = grad_first + channels;
    write_coefficients(state, scale, smaller_cluster(sums), coefficients);
    *scale_weight = scale.everywhere != 0 ? A(2) * scale.everywhere : scale.at_maximum;
    centroid_gradients(rows, state, scale, grad_first, grad_second);
    gradients.write(direction(), grad_first, grad_second, grad_clusters, sums, num_rows, channels);
  }

 private:
  using ScaleGradient = PairScaleGradient<A>;

  const A* centre() { return axis_.reserve(0); }
  const A* direction() { return centre() + transport_.channels; }
  const A* neighbour_sum() { return centre() + 2 * transport_.channels; }

  // axis: c_1, d, and for a fresh start the sum of the other rows.
  void find_axis(const Rows& rows, const PairStart<T>& start) {
    const int64_t channels = transport_.channels;
    A* axis = axis_.reserve(3 * channels);
    fresh_ = start.centroids == nullptr;
    if (!fresh_) {
      for_each_slice<A, 2>(channels, [&](auto slice) {
        for (int v = 0; v < decltype(slice)::kVectors; ++v) {
          const Vec<A> first = slice.load(start.centroids, v);
          slice.store(axis, v, first);
          slice.store(axis + channels, v, slice.load(start.centroids + channels, v) - first);
        }
      });
    } else {
      A* sum = axis + 2 * channels;
      problem_.sum_blocks(channels, sum, [&](int64_t block, A* partial) {
        const int64_t from = block * kBlockRows;
        sum_rows(rows.from(from), problem_.block_rows(block), start.own, partial);
      });
      fresh_axis(start.own, problem_.rows(), channels, axis);
    }
    squared_length_ = squared_length(direction(), channels);
  }

  // The sum of a fresh start has already brought the rows into the cache.
  template <class Sums>
  void visit_rows(const Rows& rows, int64_t count, A* columns) {
    if (fresh_) {
      reduce_rows<Sums, false>(rows, count, centre(), columns, problem_.stride());
    } else {
      reduce_rows<Sums, true>(rows, count, centre(), columns, problem_.stride());
    }
  }

  // The first logits column becomes s.
  template <bool kFindMaximum>
  CostState<A> fill_logits(const Rows& rows) {
    const int64_t stride = problem_.stride();
    const bool scaled = transport_.cost_scale != CostScale::kNone;
    A totals[3];
    problem_.fold_blocks(
        3, totals,
        [&](int64_t block, A* partial) {
          const int64_t count = problem_.block_rows(block);
          A* columns = problem_.logits(block);
          A* products = problem_.lse(block);
          const Rows some = rows.from(block * kBlockRows);
          CostTotals<A> sums;
          if (scaled) {
            visit_rows<CentredSquareAndDot>(some, count, columns);
            for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
              const Vec<A> first = load(columns + u), product = load(columns + stride + u);
              const Vec<A> second = first - A(2) * product + squared_length_;
              const Vec<A> bounded = second < 0 ? Vec<A>{} : second;
              store(products + u, product);
              store(columns + stride + u, bounded);
              sums.add(first, live);
              sums.add(bounded, live);
            });
          } else {
            visit_rows<CentredDot>(some, count, columns);
            for_each_vector<A>(count, [&](int64_t u, Mask<A> live) {
              sums.add(vabs<A>(load(columns + u)), live);
            });
          }
          sums.write(partial);
        },
        CostTotals<A>::fold);
    CostState<A> state = cost_state(problem_, totals);
    state.finite &= squared_length_ <= std::numeric_limits<A>::max();
    // Rows that are all equal have cost 0; what their mean is apart from them is rounding.
    if (scaled && fresh_ && state.finite && !rows_differ()) state.scale = 0;
    if (kFindMaximum && transport_.cost_scale == CostScale::kMax) find_maximum(problem_, state);
    const A lam = static_cast<A>(transport_.lam);
    problem_.fold_blocks(
        1, &state.peak,
        [&](int64_t block, A* partial) {
          A* column = problem_.logits(block);
          const A* products = scaled ? problem_.lse(block) : column;
          Vec<A> largest = {};
          for_each_vector<A>(problem_.block_rows(block), [&](int64_t u, Mask<A> live) {
            const Vec<A> difference = squared_length_ - A(2) * load(products + u);
            const Vec<A> s = scaled_logit<A>(difference, state.scale, lam);
            store(column + u, s);
            largest = vmax<A>(select<A>(live, vabs<A>(s), Vec<A>{}), largest);
          });
          *partial = reduce_max<A>(largest);
        },
        [](A* total, const A* partial) { *total = *partial > *total ? *partial : *total; });
    return state;
  }

  // Whether a row is not c_1. The first columns still hold |e|^2; most problems end in the first
  // row.
  bool rows_differ() {
    for (int64_t block = 0; block < problem_.num_blocks(); ++block) {
      const A* squares = problem_.logits(block);
      for (int64_t u = 0; u < problem_.block_rows(block); ++u) {
        if (squares[u] > 0) return true;
      }
    }
    return false;
  }

  // The log domain wants a column for each cluster: L = (s, 0) is as good as (L_1, L_2).
  void complete_logits() {
    problem_.for_each_block([&](int64_t block) {
      A* second = problem_.logits(block) + problem_.stride();
      for_each_vector<A>(problem_.block_rows(block),
                         [&](int64_t u, Mask<A>) { store(second + u, Vec<A>{}); });
    });
  }

  void write_assign(T* assign) {
    const int64_t stride = problem_.stride();
    problem_.for_each_block([&](int64_t block) {
      const A* weights = problem_.logits(block);
      T* out = assign + block * kBlockRows * 2;
      const int64_t count = problem_.block_rows(block);
      for (int64_t u = 0; u < count; u += kLanes<A>) {
        const Vec<A> first = load(weights + u) * A(0.5),
                     second = load(weights + stride + u) * A(0.5);
        if constexpr (kIsBFloat16<T>) {
          if (count - u >= kLanes<A>) {
            store_pairs(out + 2 * u, first, second);
            continue;
          }
        }
        Vec<A> pairs[2];
        interleave<A>(first, second, pairs);
        store_some(out + 2 * u, pairs[0], 2 * (count - u));
        store_some(out + 2 * u + kLanes<A>, pairs[1], 2 * (count - u) - kLanes<A>);
      }
    });
  }

  void write_clusters(const Rows& rows, const OutputRows<T>& clusters) {
    const int64_t channels = transport_.channels;
    A* sums = sums_.reserve(2 * channels);
    problem_.sum_blocks(2 * channels, sums, [&](int64_t block, A* partial) {
      weighted_sums<2, false>(rows.from(block * kBlockRows), problem_.block_rows(block),
                              problem_.logits(block), problem_.stride(),
                              static_cast<const A*>(nullptr), partial);
    });
    write_rows(clusters, sums, 2, channels);
  }

  void write_fresh(const Rows& rows, const PairStart<T>& start, const A (&sums)[2],
                   const OutputRows<T>& clusters) {
    const int64_t channels = transport_.channels;
    const int small = smaller_cluster(sums);
    A* mean = sums_.reserve(channels);
    problem_.sum_blocks(channels, mean, [&](int64_t block, A* partial) {
      weighted_sums<1, false>(rows.from(block * kBlockRows), problem_.block_rows(block),
                              problem_.logits(block) + small * problem_.stride(), 0,
                              static_cast<const A*>(nullptr), partial);
    });
    write_fresh_clusters(mean, neighbour_sum(), start.own, sums, channels, clusters);
  }

  // values: the gradients of K P_u1 and K P_u2.
  void fill_plan_gradient(const Rows& rows, const T* grad_assign, const T* grad_clusters) {
    const int64_t stride = problem_.stride();
    problem_.for_each_block([&](int64_t block) {
      const int64_t count = problem_.block_rows(block);
      A* values = problem_.values(block);
      if (grad_clusters != nullptr) {
        reduce_rows<Dots<2>, false>(rows.from(block * kBlockRows), count, grad_clusters, values,
                                    stride);
      } else {
        for_each_vector<A>(count, [&](int64_t u, Mask<A>) {
          store(values + u, Vec<A>{});
          store(values + stride + u, Vec<A>{});
        });
      }
      if (grad_assign == nullptr) return;
      const T* given = grad_assign + block * kBlockRows * 2;
      for (int64_t u = 0; u < count; ++u) {
        for (int64_t j = 0; j < 2; ++j) {
          values[j * stride + u] += A(0.5) * to_acc(given[u * 2 + j]);
        }
      }
    });
  }

  // log_backward takes dP = 2 (a, b) and gives dL, whose rows sum to 0.
  void log_domain_backward(const A* potentials, A (&sums)[2]) {
    complete_logits();
    const int64_t stride = problem_.stride();
    const auto each = [&](const auto& body) {
      problem_.for_each_block([&](int64_t block) {
        A* values = problem_.values(block);
        for_each_vector<A>(problem_.block_rows(block),
                           [&](int64_t u, Mask<A>) { body(values + u, values + stride + u); });
      });
    };
    each([](A* first, A* second) {
      store(first, load(first) * A(2));
      store(second, load(second) * A(2));
    });
    log_backward(problem_, potentials, scratch_);
    each([](A* first, A* second) { store(first, (load(first) - load(second)) * A(0.5)); });
    const PairHistory<A> past{potentials, static_cast<A>(problem_.rows())};
    for (int j = 0; j < 2; ++j) sums[j] = past.sum(transport_.num_iters - 1, j);
  }

  // Of s = lam (M_2 - M_1) / scale: dscale = -sum(ds s) / scale.
  ScaleGradient scale_gradient(const CostState<A>& state) {
    ScaleGradient out;
    if (transport_.cost_scale == CostScale::kNone || !(state.scale > 0)) return out;
    A dot = 0;
    problem_.sum_blocks(1, &dot, [&](int64_t block, A* partial) {
      const A* column = problem_.logits(block);
      const A* values = problem_.values(block);
      Vec<A> sum = {};
      for_each_vector<A>(problem_.block_rows(block), [&](int64_t u, Mask<A> live) {
        sum += select<A>(live, load(column + u) * load(values + u), Vec<A>{});
      });
      *partial = reduce_add<A>(sum);
    });
    const A gradient = limit_gradient(-dot / state.scale);
    if (transport_.cost_scale == CostScale::kMean) {
      out.everywhere = gradient / static_cast<A>(problem_.rows());
    } else {
      out.at_maximum = A(2) * gradient;
    }
    return out;
  }

  // values: ds becomes 2 lam/scale ds, which is 2 dM_u2 = -2 dM_u1 apart from the scale's gradient.
  void write_coefficients(const CostState<A>& state, const ScaleGradient& scale, int small,
                          A* coefficients) {
    const int64_t stride = problem_.stride();
    const A mark = scale.everywhere != 0 ? A(-1) : A(1);
    const A lam = static_cast<A>(transport_.lam);
    const A factor = state.scale > 0 ? limit_gradient(A(2) * lam / state.scale) : A(0);
    problem_.for_each_block([&](int64_t block) {
      const A* weights = problem_.weights(block) + small * stride;
      A* values = problem_.values(block);
      A* out = coefficients + block * kBlockRows * 2;
      const int64_t count = problem_.block_rows(block);
      for_each_vector<A>(count, [&](int64_t u, Mask<A>) {
        store(values + u, clamp_logit<A>(load(values + u) * factor));
      });
      for (int64_t u = 0; u < count; ++u) {
        out[u * 2] = mark * weights[u];
        out[u * 2 + 1] = -values[u] - scale.everywhere;
      }
    });
    if (state.max_row >= 0 && scale.at_maximum != 0) {
      add_maximum_coefficient(scale.at_maximum, state.max_cluster,
                              coefficients + state.max_row * 2);
    }
  }

  // grad_cj = sum_u 2 dM_uj (c_j - z_u). With v = 2 dM_u2 the first is sum(v e), the second
  // sum(v) d - sum(v e); then what the scale adds.
  void centroid_gradients(const Rows& rows, const CostState<A>& state, const ScaleGradient& scale,
                          A* grad_first, A* grad_second) {
    const int64_t channels = transport_.channels;
    A total = 0;
    problem_.sum_blocks(1, &total, [&](int64_t block, A* partial) {
      const A* values = problem_.values(block);
      Vec<A> sum = {};
      for_each_vector<A>(problem_.block_rows(block), [&](int64_t u, Mask<A> live) {
        sum += select<A>(live, load(values + u), Vec<A>{});
      });
      *partial = reduce_add<A>(sum);
    });
    centred_sum(rows, [&](int64_t block) { return problem_.values(block); }, grad_first);
    second_centroid_gradient(direction(), total, channels, grad_first, grad_second);
    if (scale.everywhere != 0) {
      A* sum = grad_second + channels;  // of e over all rows
      problem_.for_each_block([&](int64_t block) {
        A* ones = problem_.values(block) + problem_.stride();
        for_each_vector<A>(problem_.block_rows(block),
                           [&](int64_t u, Mask<A>) { store(ones + u, splat<A>(1)); });
      });
      centred_sum(
          rows, [&](int64_t block) { return problem_.values(block) + problem_.stride(); }, sum);
      add_mean_gradient(direction(), sum, scale.everywhere, problem_.rows(), channels, grad_first,
                        grad_second);
    }
    if (state.max_row >= 0 && scale.at_maximum != 0) {
      add_maximum_gradient(rows.row(state.max_row), centre(), state.max_cluster, scale.at_maximum,
                           channels, state.max_cluster == 0 ? grad_first : grad_second);
    }
  }

  // out = sum_u weight_u (z_u - c_1)
  template <class Weights>
  void centred_sum(const Rows& rows, const Weights& weights, A* out) {
    problem_.sum_blocks(transport_.channels, out, [&](int64_t block, A* partial) {
      weighted_sums<1, true>(rows.from(block * kBlockRows), problem_.block_rows(block),
                             weights(block), 0, centre(), partial);
    });
  }

  const Transport& transport_;
  Problem<A> problem_;
  Buffer<A> axis_, scratch_, sums_;
  A squared_length_ = 0;
  bool fresh_ = false;
};

extern template class PairSolver<float>;
extern template class PairSolver<double>;
extern template class PairSolver<BFloat16>;

// grad_z of a node: the sum over its entries of Q U + m d + V, and w (z_i - c_1) in marked slots.
// The table begins with problem table_begin; first_centroids[problem * first_stride] is c_1.
template <class T, class Entries>
void gather_pair_gradient(const Entries& entries, int64_t begin, int64_t end, int64_t channels,
                          const Acc<T>* coefficients, const Acc<T>* scale_weights, const T* table,
                          int64_t table_begin, const T* z_row, const T* first_centroids,
                          int64_t first_stride, Acc<T>* out) {
  using A = Acc<T>;
  for_each_slice<A, kSliceVectors>(channels, [&](auto slice) {
    constexpr int NV = decltype(slice)::kVectors;
    Vec<A> acc[NV] = {};
    for (int64_t k = begin; k < end; ++k) {
      if (slice.first == 0) {
        entries.prefetch(k);
        const int64_t soon = k + entries.distance / 2;  // the coefficient that marks it has come
        if (soon < entries.count) {
          if (std::signbit(coefficients[entries.slot(soon) * 2])) {
            prefetch_row(first_centroids + entries.problem(soon) * first_stride, channels);
          }
        }
      }
      const int64_t problem = entries.problem(k);
      const A* coefficient = coefficients + entries.slot(k) * 2;
      const T* rows = table + (problem - table_begin) * kPairRows * channels;
      const A plan = std::fabs(coefficient[0]), slope = coefficient[1];
      for (int v = 0; v < NV; ++v) {
        acc[v] += plan * slice.load(rows, v) + slice.load(rows + 2 * channels, v);
        acc[v] += slope * slice.load(rows + channels, v);
      }
      if (std::signbit(coefficient[0])) {
        const T* first = first_centroids + problem * first_stride;
        const A weight = scale_weights[problem];
        for (int v = 0; v < NV; ++v) {
          acc[v] += weight * (slice.load(z_row, v) - slice.load(first, v));
        }
      }
    }
    for (int v = 0; v < NV; ++v) slice.store(out, v, acc[v]);
  });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
