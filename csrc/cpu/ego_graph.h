// Ego-neighbourhoods of a directed graph in compressed rows, with their transpose, in O(E + N).
//
//   members of ego i  =  {i} ∪ {j : edge j -> i},  ascending, each once
//   transpose         =  for node i the egos that hold it, ascending, and the slot (CSR position)
//   there
//
// Everything is a stable counting sort. One sort by source and one by target put the edges in
// (target, source) order, so that parallel edges are neighbours and drop out in one sweep; a third
// sort, of the slots by member, is the transpose. Edges that come sorted by source save the first.
//
// Work split: the input is cut into chunks; each chunk counts its keys, a scan over (key, chunk)
// gives every chunk its own place to write, and the chunks are written independently. The result is
// unique, whatever the number of chunks. The histograms hold chunks * N counters, so chunks <= E /
// N keeps memory and time linear.
//
// `Parallel` is a callable: parallel(count, body) runs body(0) ... body(count - 1), in any order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace dcgnn::cpu {

// Runs chunks one after the other; the bindings supply the parallel one.
struct Serial {
  template <class Body>
  void operator()(int64_t count, const Body& body) const {
    for (int64_t i = 0; i < count; ++i) body(i);
  }
};

// A cut of [0, size) into `count` ranges of nearly equal length.
struct Chunks {
  int64_t size;
  int64_t count;
  int64_t begin(int64_t chunk) const { return size * chunk / count; }
  int64_t end(int64_t chunk) const { return size * (chunk + 1) / count; }
};

inline Chunks histogram_chunks(int64_t num_items, int64_t num_keys, int64_t max_chunks) {
  const int64_t affordable = num_items / std::max<int64_t>(num_keys, 1);
  return {num_items, std::max<int64_t>(1, std::min(max_chunks, affordable))};
}

// Stable counting sort of items 0..size-1: visits them through `key(item)` and hands every item its
// position in key order to `place(item, position)`. offsets[k] becomes the first position of key k.
template <class Index, class Key, class Place, class Parallel>
void counting_sort(int64_t num_items, int64_t num_keys, int64_t max_chunks, const Key& key,
                   const Place& place, Index* offsets, const Parallel& parallel) {
  const Chunks chunks = histogram_chunks(num_items, num_keys, max_chunks);
  std::vector<Index> histogram(static_cast<size_t>(chunks.count * num_keys), 0);
  parallel(chunks.count, [&](int64_t chunk) {
    Index* counts = histogram.data() + chunk * num_keys;
    for (int64_t item = chunks.begin(chunk); item < chunks.end(chunk); ++item) ++counts[key(item)];
  });
  Index running = 0;
  for (int64_t k = 0; k < num_keys; ++k) {
    offsets[k] = running;
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      Index& count = histogram[static_cast<size_t>(chunk * num_keys + k)];
      const Index first = running;
      running += count;
      count = first;
    }
  }
  offsets[num_keys] = running;
  parallel(chunks.count, [&](int64_t chunk) {
    Index* next = histogram.data() + chunk * num_keys;
    for (int64_t item = chunks.begin(chunk); item < chunks.end(chunk); ++item) {
      place(item, next[key(item)]++);
    }
  });
}

// Two calls, because the number of slots is known only after the parallel edges are gone:
//   EgoGraphBuilder<int32_t> builder(source, target, num_edges, num_nodes, chunks, parallel);
//   allocate builder.num_slots() entries; builder.write(rowptr, member, colptr, ego, slot, ...);
// `Index` must hold num_edges + num_nodes. Sources and targets must lie in [0, num_nodes).
template <class Index, class Parallel>
class EgoGraphBuilder {
 public:
  template <class Input>
  EgoGraphBuilder(const Input* source, const Input* target, int64_t num_edges, int64_t num_nodes,
                  int64_t max_chunks, const Parallel& parallel)
      : num_nodes_(num_nodes),
        max_chunks_(max_chunks),
        parallel_(parallel),
        target_offset_(static_cast<size_t>(num_nodes) + 1),
        source_of_(new Index[static_cast<size_t>(num_edges)]),
        row_size_(static_cast<size_t>(num_nodes)) {
    // Sorts by target what order(0), order(1), ... has sorted by source.
    const auto sort_by_target = [&](const auto& order) {
      counting_sort<Index>(
          num_edges, num_nodes, max_chunks_, [&](int64_t k) { return target[order(k)]; },
          [&](int64_t k, Index position) {
            source_of_[position] = static_cast<Index>(source[order(k)]);
          },
          target_offset_.data(), parallel_);
    };
    if (std::is_sorted(source, source + num_edges)) {  // as PyG's coalesce leaves edges
      sort_by_target([](int64_t k) { return k; });
    } else {
      std::unique_ptr<Index[]> by_source(new Index[static_cast<size_t>(num_edges)]);
      counting_sort<Index>(
          num_edges, num_nodes, max_chunks_, [&](int64_t edge) { return source[edge]; },
          [&](int64_t edge, Index position) { by_source[position] = static_cast<Index>(edge); },
          target_offset_.data(), parallel_);
      sort_by_target([&](int64_t k) { return by_source[k]; });
    }
    for_each_row([&](int64_t node) {
      row_size_[static_cast<size_t>(node)] = merge_row(node, [](Index, Index) {});
    });
    for (const Index size : row_size_) num_slots_ += size;
  }

  int64_t num_slots() const { return num_slots_; }

  // rowptr, colptr: num_nodes + 1 entries; member, ego, slot: num_slots() entries.
  void write(Index* rowptr, Index* member, Index* colptr, Index* ego, Index* slot) const {
    rowptr[0] = 0;
    for (int64_t node = 0; node < num_nodes_; ++node) {
      rowptr[node + 1] = rowptr[node] + row_size_[static_cast<size_t>(node)];
    }
    std::unique_ptr<Index[]> ego_of_slot(new Index[static_cast<size_t>(num_slots_)]);
    for_each_row([&](int64_t node) {
      const Index first = rowptr[node];
      merge_row(node, [&](Index position, Index source) {
        member[first + position] = source;
        ego_of_slot[first + position] = static_cast<Index>(node);
      });
    });
    counting_sort<Index>(
        num_slots_, num_nodes_, max_chunks_, [&](int64_t k) { return member[k]; },
        [&](int64_t k, Index position) {
          ego[position] = ego_of_slot[k];
          slot[position] = static_cast<Index>(k);
        },
        colptr, parallel_);
  }

 private:
  // Walks the sorted sources of one target, each once, with the target itself in its place.
  template <class Visit>
  Index merge_row(int64_t node, const Visit& visit) const {
    const Index self = static_cast<Index>(node);
    Index size = 0;
    Index previous = -1;
    bool self_done = false;
    for (Index k = target_offset_[node]; k < target_offset_[node + 1]; ++k) {
      const Index source = source_of_[k];
      if (source == previous || source == self) continue;
      if (source > self && !self_done) {
        visit(size++, self);
        self_done = true;
      }
      visit(size++, source);
      previous = source;
    }
    if (!self_done) visit(size++, self);
    return size;
  }

  template <class Body>
  void for_each_row(const Body& body) const {
    const Chunks rows{num_nodes_, std::max<int64_t>(1, max_chunks_)};
    parallel_(rows.count, [&](int64_t chunk) {
      for (int64_t node = rows.begin(chunk); node < rows.end(chunk); ++node) body(node);
    });
  }

  int64_t num_nodes_;
  int64_t max_chunks_;
  const Parallel& parallel_;
  std::vector<Index> target_offset_;
  std::unique_ptr<Index[]> source_of_;
  std::vector<Index> row_size_;
  int64_t num_slots_ = 0;
};

}  // namespace dcgnn::cpu
