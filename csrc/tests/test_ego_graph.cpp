// Compares the counting-sort construction with sets built by brute force, for several chunk counts.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cpu/ego_graph.h"

namespace {

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

// One thread for each chunk, so that the thread sanitizer sees the real sharing.
struct Threads {
  template <class Body>
  void operator()(int64_t count, const Body& body) const {
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
    for (auto& thread : threads) thread.join();
  }
};

template <class Index>
void check_graph(const std::vector<int64_t>& source, const std::vector<int64_t>& target,
                 int64_t num_nodes, int64_t chunks) {
  const Threads parallel;
  const dcgnn::cpu::EgoGraphBuilder<Index, Threads> builder(source.data(), target.data(),
                                                            static_cast<int64_t>(source.size()),
                                                            num_nodes, chunks, parallel);
  std::vector<std::set<int64_t>> members(num_nodes);
  std::vector<std::set<int64_t>> egos(num_nodes);
  for (int64_t i = 0; i < num_nodes; ++i) {
    members[i].insert(i);
    egos[i].insert(i);
  }
  for (size_t e = 0; e < source.size(); ++e) {
    members[target[e]].insert(source[e]);
    egos[source[e]].insert(target[e]);
  }
  size_t num_slots = 0;
  for (const auto& set : members) num_slots += set.size();
  CHECK(builder.num_slots() == static_cast<int64_t>(num_slots));

  std::vector<Index> rowptr(num_nodes + 1), colptr(num_nodes + 1);
  std::vector<Index> member(num_slots), ego(num_slots), slot(num_slots);
  builder.write(rowptr.data(), member.data(), colptr.data(), ego.data(), slot.data());
  CHECK(rowptr[0] == 0 && colptr[0] == 0);
  for (int64_t i = 0; i < num_nodes; ++i) {
    Index k = rowptr[i];
    for (const int64_t expected : members[i]) CHECK(member[k++] == expected);
    CHECK(k == rowptr[i + 1]);
    k = colptr[i];
    for (const int64_t expected : egos[i]) {
      CHECK(ego[k] == expected);
      CHECK(member[slot[k]] == i);
      CHECK(rowptr[expected] <= slot[k] && slot[k] < rowptr[expected + 1]);
      ++k;
    }
    CHECK(k == colptr[i + 1]);
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(7);
  int cases = 0;
  for (const int64_t num_nodes : {0, 1, 2, 5, 40}) {
    for (const int64_t num_edges : {0, 1, 3, 60, 900}) {
      if (num_nodes == 0 && num_edges > 0) continue;
      std::vector<int64_t> source(num_edges), target(num_edges);
      for (int64_t e = 0; e < num_edges; ++e) {
        source[e] = static_cast<int64_t>(random() % num_nodes);
        // A third of the edges goes to node 0: a hub with parallel edges.
        target[e] = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % num_nodes);
      }
      for (const int64_t chunks : {1, 2, 7}) {
        check_graph<int32_t>(source, target, num_nodes, chunks);
        check_graph<int64_t>(source, target, num_nodes, chunks);
        ++cases;
      }
    }
  }
  std::printf("ego_graph: %d cases\n", cases);
  return 0;
}
