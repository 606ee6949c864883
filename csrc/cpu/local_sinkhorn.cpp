// One transport problem for every ego. Forward: one visit to each ego, egos cut into tasks by
// slots. Backward: one visit to each ego for the gradient of its centroids and what its members
// need, then a gather over the transpose for grad_z. Nothing of size S x F is ever stored.
#include <atomic>

#include "pair_batch.h"
#include "segments.h"
#include "tables.h"
#include "transport.h"

namespace dcgnn::cpu::DCGNN_ISA {
namespace {

template <class T>
struct Egos {
  GraphView graph;
  IndexArray rowptr = graph.rowptr, member = graph.member;

  int64_t size(int64_t ego) const { return rowptr[ego + 1] - rowptr[ego]; }
  GatheredRows<T> rows(const T* z, int64_t channels, int64_t ego) const {
    return {z, channels, member, graph.num_slots, rowptr[ego]};
  }
  PairStart<T> start(const T* z, const T* centroids, int64_t channels, int64_t ego) const {
    if (centroids != nullptr) return {centroids + ego * 2 * channels, nullptr};
    return {nullptr, z + ego * channels};
  }
  SmallEgo<T> small(const T* z, int64_t channels, int64_t ego) const {
    return {rows(z, channels, ego), size(ego), ego, z + ego * channels};
  }
  // solve(solver, ego) for every ego, with solvers of this type.
  template <class Solver, class Solve>
  void for_each(const Transport& transport, const Executor& executor, const Solve& solve) const {
    const SerialExecutor serial;
    for_each_segment(
        rowptr, graph.num_egos, executor, [&] { return Solver(transport, serial); }, solve,
        [&](int64_t ego) {
          Solver solver(transport, executor);
          solve(solver, ego);
        });
  }
};

// A thread's solver and the small egos that wait for company.
template <class T, class Batch>
struct PairSolvers {
  PairSolver<T> solver;
  Batch batch;
};

// For the egos of [first, last): add(batch, ego) if they start fresh and a batch takes it, else
// solve(solver, ego); finish(solvers) whenever a batch is full.
template <class T, class Batch, class Add, class Solve, class Finish>
void for_each_pair(const Egos<T>& egos, int64_t first, int64_t last, const Transport& transport,
                   bool fresh, const Executor& executor, const Add& add, const Solve& solve,
                   const Finish& finish) {
  using Solvers = PairSolvers<T, Batch>;
  const SerialExecutor serial;
  for_each_segment(
      egos.rowptr.from(first), last - first, executor,
      [&] { return Solvers{{transport, serial}, Batch(transport)}; },
      [&](Solvers& own, int64_t index) {
        const int64_t ego = first + index;
        if (!fresh || !Batch::takes(transport, egos.size(ego))) {
          solve(own.solver, ego);
          return;
        }
        add(own.batch, ego);
        if (own.batch.is_full()) finish(own);
      },
      [&](int64_t index) {
        PairSolver<T> solver(transport, executor);
        solve(solver, first + index);
      },
      finish);
}

template <class T>
bool run_forward(const SinkhornForward& call, const Executor& executor) {
  using A = Acc<T>;
  const Transport& transport = call.transport;
  const int64_t clusters = transport.num_clusters, channels = transport.channels;
  const int64_t steps = transport.num_iters == 0 ? 1 : transport.num_iters;
  const int64_t width = clusters * channels;
  const Egos<T> egos{GraphView(*call.graph)};
  const T* z = static_cast<const T*>(call.z);
  const T* centroids = static_cast<const T*>(call.centroids);
  std::atomic<bool> finite{true};
  const auto note = [&](bool ok) {
    if (!ok) finite.store(false, std::memory_order_relaxed);
  };
  const auto assign = [&](int64_t ego) {
    return static_cast<T*>(call.assign) + egos.rowptr[ego] * clusters;
  };
  const auto all_clusters = output_rows<T>(call.clusters, egos.graph.num_egos * clusters, channels);
  const auto new_clusters = [&](int64_t ego) { return all_clusters + ego * width; };
  const auto potentials = [&](int64_t ego) {
    return static_cast<A*>(call.potentials) + ego * steps * clusters;
  };
  if (clusters != 2) {
    egos.template for_each<TransportSolver<T>>(transport, executor, [&](auto& solver, int64_t ego) {
      note(solver.forward(egos.rows(z, channels, ego), egos.size(ego), centroids + ego * width,
                          assign(ego), new_clusters(ego).data, potentials(ego)));
    });
    return finite.load();
  }
  const auto solve = [&](PairSolver<T>& solver, int64_t ego) {
    note(solver.forward(egos.rows(z, channels, ego), egos.size(ego),
                        egos.start(z, centroids, channels, ego), assign(ego), new_clusters(ego),
                        potentials(ego)));
  };
  for_each_pair<T, PairForwardBatch<T>>(
      egos, 0, egos.graph.num_egos, transport, centroids == nullptr, executor,
      [&](auto& batch, int64_t ego) {
        batch.add(egos.small(z, channels, ego), {assign(ego), new_clusters(ego), potentials(ego)});
      },
      solve,
      [&](auto& own) { note(own.batch.solve([&](int64_t ego) { solve(own.solver, ego); })); });
  return finite.load();
}

// The nodes' part of the backward: gather(entries, node, begin, end, sums) over the transpose.
// fetch: of so many rows.
template <class T, class Fetch, class Gather, class Write>
void gather_nodes(const GraphView& graph, int64_t channels, const Executor& executor, int64_t rows,
                  const Fetch& fetch, const Gather& gather, const Write& write) {
  const int64_t fetched = rows * channels * static_cast<int64_t>(sizeof(T));
  with_transpose_entries(graph, fetched, fetch, [&](const auto& entries) {
    sum_segment_blocks<Acc<T>>(
        graph.colptr, graph.num_nodes, channels, executor,
        [&](int64_t node, int64_t begin, int64_t end, Acc<T>* sums) {
          gather(entries, node, begin, end, sums);
        },
        write);
  });
}

// visit(graph, first, last) for parts of at most `part` egos, with the transpose's entries of each.
template <class Visit>
void for_each_part(const GraphView& graph, int64_t part, const Executor& executor,
                   const Visit& visit) {
  if (part >= graph.num_egos) {
    visit(graph, 0, graph.num_egos);
    return;
  }
  const auto run = [&](auto parts) {
    for (int64_t first = 0; first < graph.num_egos; first += part) {
      const int64_t last = first + part < graph.num_egos ? first + part : graph.num_egos;
      visit(parts.cut(last), first, last);
    }
  };
  if (graph.ego.wide) {
    run(TransposeParts<int64_t>(graph, executor));
  } else {
    run(TransposeParts<int32_t>(graph, executor));
  }
}

template <class T>
void run_pair_backward(const SinkhornBackward& call, const Executor& executor) {
  using A = Acc<T>;
  const Transport& transport = call.transport;
  const int64_t channels = transport.channels;
  const int64_t steps = transport.num_iters == 0 ? 1 : transport.num_iters;
  const Egos<T> egos{GraphView(*call.graph)};
  const T* z = static_cast<const T*>(call.z);
  const T* centroids = static_cast<const T*>(call.centroids);
  const T* grad_assign = static_cast<const T*>(call.grad_assign);
  const T* grad_clusters = static_cast<const T*>(call.grad_clusters);
  A* coefficients = static_cast<A*>(call.coefficients);
  A* scale_weights = coefficients + 2 * egos.graph.num_slots;
  const auto table = output_rows<T>(call.table, call.table_problems * kPairRows, channels);
  T* grad_centroids = static_cast<T*>(call.grad_centroids);
  T* grad_z = static_cast<T*>(call.grad_z);  // at first what a fresh ego's own row gets
  const bool fresh = centroids == nullptr;
  const T* first_centroids = fresh ? z : centroids;
  const int64_t first_stride = fresh ? channels : 2 * channels;

  const auto run_part = [&](const GraphView& graph, int64_t first, int64_t last) {
    const auto arrays = [&](int64_t ego) -> typename PairBackwardBatch<T>::Arrays {
      const int64_t begin = egos.rowptr[ego];
      return {static_cast<const A*>(call.potentials) + ego * steps * 2,
              grad_assign == nullptr ? nullptr : grad_assign + begin * 2,
              grad_clusters == nullptr ? nullptr : grad_clusters + ego * 2 * channels,
              coefficients + begin * 2,
              scale_weights + ego,
              {table + (ego - first) * kPairRows * channels,
               fresh ? nullptr : grad_centroids + ego * 2 * channels, grad_z + ego * channels,
               first > 0}};
    };
    const auto solve = [&](PairSolver<T>& solver, int64_t ego) {
      const auto a = arrays(ego);
      solver.backward(egos.rows(z, channels, ego), egos.size(ego),
                      egos.start(z, centroids, channels, ego), a.potentials, a.grad_assign,
                      a.grad_clusters, a.coefficients, a.scale_weight, a.gradients);
    };
    for_each_pair<T, PairBackwardBatch<T>>(
        egos, first, last, transport, fresh, executor,
        [&](auto& batch, int64_t ego) { batch.add(egos.small(z, channels, ego), arrays(ego)); },
        solve, [&](auto& own) { own.batch.solve([&](int64_t ego) { solve(own.solver, ego); }); });

    const T* rows = table.data;
    gather_nodes<T>(
        graph, channels, executor, kPairRows,
        [=](int64_t ego, int64_t slot) {
          prefetch_row(rows + (ego - first) * kPairRows * channels, kPairRows * channels);
          prefetch_line(coefficients + slot * 2);
        },
        [&](const auto& entries, int64_t node, int64_t begin, int64_t end, A* sums) {
          gather_pair_gradient(entries, begin, end, channels, coefficients, scale_weights, rows,
                               first, z + node * channels, first_centroids, first_stride, sums);
        },
        [&](int64_t node, A* sums) {
          T* out = grad_z + node * channels;
          const bool started = first > 0 || (fresh && node < last);
          for_each_slice<A, 2>(channels, [&](auto slice) {
            slice.write(out, [&](int v) {
              const Vec<A> begun = started ? slice.load(out, v) : Vec<A>{};
              return begun + slice.load(sums, v);
            });
          });
        });
  };
  for_each_part(egos.graph, call.table_problems, executor, run_part);
}

template <class T>
void run_backward(const SinkhornBackward& call, const Executor& executor) {
  using A = Acc<T>;
  const Transport& transport = call.transport;
  const int64_t clusters = transport.num_clusters, channels = transport.channels;
  const int64_t width = clusters * channels;
  const int64_t steps = transport.num_iters == 0 ? 1 : transport.num_iters;
  const Egos<T> egos{GraphView(*call.graph)};
  const T* z = static_cast<const T*>(call.z);
  const T* centroids = static_cast<const T*>(call.centroids);
  const T* grad_assign = static_cast<const T*>(call.grad_assign);
  const T* grad_clusters = static_cast<const T*>(call.grad_clusters);
  A* coefficients = static_cast<A*>(call.coefficients);
  egos.template for_each<TransportSolver<T>>(transport, executor, [&](auto& solver, int64_t ego) {
    const int64_t begin = egos.rowptr[ego];
    solver.backward(egos.rows(z, channels, ego), egos.size(ego), centroids + ego * width,
                    static_cast<const A*>(call.potentials) + ego * steps * clusters,
                    grad_assign == nullptr ? nullptr : grad_assign + begin * clusters,
                    grad_clusters == nullptr ? nullptr : grad_clusters + ego * width,
                    {coefficients + begin * 2 * clusters, {nullptr, false}},
                    static_cast<T*>(call.grad_centroids) + ego * width);
  });
  gather_nodes<T>(
      egos.graph, channels, executor, 2 * clusters,
      [=](int64_t ego, int64_t slot) {
        prefetch_row(centroids + ego * width, width);
        if (grad_clusters != nullptr) prefetch_row(grad_clusters + ego * width, width);
        prefetch_line(coefficients + slot * 2 * clusters);
      },
      [&](const auto& entries, int64_t node, int64_t begin, int64_t end, A* sums) {
        using Entries = std::decay_t<decltype(entries)>;
        const auto gather = grad_clusters == nullptr ? gather_node_gradient<false, T, Entries>
                                                     : gather_node_gradient<true, T, Entries>;
        gather(entries, begin, end, clusters, channels, coefficients, z + node * channels,
               centroids, grad_clusters, sums);
      },
      [&](int64_t node, const A* sums) {
        write_row(static_cast<T*>(call.grad_z) + node * channels, sums, channels);
      });
}

}  // namespace

bool local_sinkhorn(const SinkhornForward& call, const Executor& executor) {
  bool finite = true;
  with_storage(call.dtype,
               [&](auto storage) { finite = run_forward<decltype(storage)>(call, executor); });
  return finite;
}

void local_sinkhorn_backward(const SinkhornBackward& call, const Executor& executor) {
  with_storage(call.dtype, [&](auto storage) {
    if (call.transport.num_clusters == 2) {
      run_pair_backward<decltype(storage)>(call, executor);
    } else {
      run_backward<decltype(storage)>(call, executor);
    }
  });
}

}  // namespace dcgnn::cpu::DCGNN_ISA
