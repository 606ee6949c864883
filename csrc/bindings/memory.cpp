#include "bindings/memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cpu/types.h"

namespace dcgnn {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kLargeBytes = kHugePage;

// A range of memory, in whole huge pages. Its pieces are mapped each on its own, in order.
struct Block {
  char* data = nullptr;
  size_t bytes = 0;
  std::vector<size_t> pieces;
};

size_t round_up(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

#ifdef __linux__

// Fresh pages. Those that nobody writes to are never there.
Block map_block(size_t bytes) {
  constexpr int kAccess = PROT_READ | PROT_WRITE, kKind = MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapped = mmap(nullptr, bytes + kHugePage, kAccess, kKind, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* const start = static_cast<char*>(mapped);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
  if (before > 0) munmap(start, before);
  munmap(start + before + bytes, kHugePage - before);
  madvise(start + before, bytes, MADV_HUGEPAGE);  // advice: where it is not taken nothing is lost
  return {start + before, bytes, {bytes}};
}

void unmap_block(const Block& block) { munmap(block.data, block.bytes); }

// Moves the last pages of `from`, as many as fit, to `to` from `offset` on; gives how many bytes. A
// page keeps its memory, only its address changes.
size_t move_pages(Block& from, Block& to, size_t offset) {
  size_t moved = 0;
  while (!from.pieces.empty() && offset + moved < to.bytes) {
    size_t& piece = from.pieces.back();
    const size_t size = std::min(piece, to.bytes - offset - moved);
    char* const source = from.data + from.bytes - size;
    char* const target = to.data + offset + moved;
    if (mremap(source, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) {
      unmap_block(from);
      unmap_block(to);
      from = to = {};
      throw std::bad_alloc();
    }
    from.bytes -= size;
    piece -= size;
    if (piece == 0) from.pieces.pop_back();
    moved += size;
    to.pieces.push_back(size);
  }
  return moved;
}

// `bytes` of memory from the pages of kept blocks, the oldest first; what they lack is fresh.
Block assemble_block(size_t bytes, std::list<Block>& kept) {
  Block block = map_block(bytes);
  block.pieces.clear();
  size_t offset = 0;
  while (!kept.empty() && offset < bytes) {
    offset += move_pages(kept.front(), block, offset);
    if (kept.front().bytes == 0) kept.pop_front();
  }
  if (offset < bytes) block.pieces.push_back(bytes - offset);
  return block;
}

#else

Block map_block(size_t bytes) {
  void* data = std::aligned_alloc(kHugePage, bytes);
  if (data == nullptr) throw std::bad_alloc();
  return {static_cast<char*>(data), bytes, {bytes}};
}

void unmap_block(const Block& block) { std::free(block.data); }

Block assemble_block(size_t bytes, std::list<Block>&) { return map_block(bytes); }

#endif

// A quarter of the machine's memory, at most 8 GiB; DCGNN_KEEP_MB sets another limit, 0 keeps
// nothing.
size_t keep_limit() {
  if (const char* text = std::getenv("DCGNN_KEEP_MB")) {
    const long long megabytes = std::atoll(text);
    return megabytes > 0 ? static_cast<size_t>(megabytes) << 20 : 0;
  }
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return size_t{2} << 30;
  return std::min(static_cast<size_t>(pages) / 4 * static_cast<size_t>(page), size_t{8} << 30);
}

class KeptPages final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Block* block = new Block(take(bytes));
    return {block->data, block, &KeptPages::give_back, c10::Device(c10::kCPU)};
  }
  // The deleter needs the block's size, not its address alone.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // Memory for a kernel's own use, to be returned by give_back(*handle).
  void* take_working_memory(int64_t bytes, void** handle) {
    Block* block = new Block(take(static_cast<size_t>(bytes)));
    *handle = block;
    return block->data;
  }
  static void give_back(void* context);

  int64_t kept() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(kept_bytes());
  }

  int64_t release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t before = kept_bytes();
    shrink_to(0);
    return static_cast<int64_t>(before);
  }

 private:
  // A kept block of about the right size as it is, else one made of kept pages, so that what is
  // kept never adds to what is needed. A lock that is not free at once is not waited for: whoever
  // held it may not exist any more after a fork.
  Block take(size_t wanted) {
    const size_t bytes = round_up(wanted);
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return map_block(bytes);
    auto best = blocks_.end();
    for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
      const bool fits = it->bytes >= bytes && it->bytes <= bytes + bytes / 8;
      if (fits && (best == blocks_.end() || it->bytes <= best->bytes)) best = it;
    }
    if (best == blocks_.end()) return assemble_block(bytes, blocks_);
    Block block = std::move(*best);
    blocks_.erase(best);
    return block;
  }

  void keep(Block block) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || block.bytes > limit_) {
      unmap_block(block);
      return;
    }
    shrink_to(limit_ - block.bytes);
    blocks_.push_back(std::move(block));
  }

  size_t kept_bytes() const {
    size_t total = 0;
    for (const Block& block : blocks_) total += block.bytes;
    return total;
  }

  void shrink_to(size_t limit) {
    while (kept_bytes() > limit) {
      unmap_block(blocks_.front());
      blocks_.pop_front();
    }
  }

  std::mutex mutex_;
  std::list<Block> blocks_;  // oldest first
  const size_t limit_ = keep_limit();
};

KeptPages& pages() {
  static KeptPages* const kPages = new KeptPages;  // never destroyed: tensors may outlive statics
  return *kPages;
}

void KeptPages::give_back(void* context) {
  Block* block = static_cast<Block*>(context);
  pages().keep(std::move(*block));
  delete block;
}

const bool kKernelsUsePages = [] {
  cpu::working_memory() = {
      [](int64_t bytes, void** handle) { return pages().take_working_memory(bytes, handle); },
      &KeptPages::give_back};
  return true;
}();

}  // namespace

at::Tensor empty_output(at::IntArrayRef shape, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const size_t bytes = at::detail::computeStorageNbytesContiguous(shape, c10::elementSize(dtype));
  if (bytes < kLargeBytes) return at::empty(shape, options);
  at::Tensor out = at::detail::empty_generic(
      shape, &pages(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory() &&
      c10::isFloatingType(dtype)) {
    out.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return out;
}

int64_t kept_bytes() { return pages().kept(); }

int64_t release_kept_memory() { return pages().release(); }

}  // namespace dcgnn
