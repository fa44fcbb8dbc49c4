// The memory that oneDNN gets: blocks that lie apart, hold what was written, and go back.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cases.h"
#include "onednn/memory.h"

namespace edgeweave::tests {
namespace {

using onednn::allocate;
using onednn::deallocate;
using onednn::memory_use;

struct Block {
  unsigned char* data;
  size_t bytes;
  unsigned char mark;
};

std::atomic<int64_t> checks{0};

void expect_true(bool good, const char* what) {
  if (!good) fail_at(what, 0, 0, 0, 1);
  ++checks;
}

void fill(const Block& block) { std::memset(block.data, block.mark, block.bytes); }

bool holds_its_mark(const Block& block) {
  return std::all_of(block.data, block.data + block.bytes, [&](unsigned char c) { return c == block.mark; });
}

// Takes and gives back blocks at random; every block keeps what its owner wrote.
void exercise(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Block> blocks;
  for (int round = 0; round < 400; ++round) {
    if (blocks.size() < 24 && random() % 3 != 0) {
      // From below the pool's least size to above a huge page.
      const size_t bytes = size_t{1} << (random() % 22);
      const size_t alignment = size_t{8} << (random() % 10);
      auto* data = static_cast<unsigned char*>(allocate(bytes + random() % 100, alignment));
      expect_true(data != nullptr, "pool gives a block");
      expect_true(reinterpret_cast<uintptr_t>(data) % alignment == 0, "pool aligns it");
      blocks.push_back({data, bytes, static_cast<unsigned char>(random())});
      fill(blocks.back());
    } else if (!blocks.empty()) {
      const size_t which = random() % blocks.size();
      expect_true(holds_its_mark(blocks[which]), "a block holds what was written");
      deallocate(blocks[which].data);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  for (const Block& block : blocks) {
    expect_true(holds_its_mark(block), "a block holds what was written");
    deallocate(block.data);
  }
}

}  // namespace

void test_pool() {
  where.kernel = "pool";
  exercise(1);
  std::vector<std::thread> threads;
  for (unsigned seed = 2; seed < 6; ++seed) threads.emplace_back(exercise, seed);
  for (std::thread& thread : threads) thread.join();
  expect_true(memory_use().used == 0, "all blocks went back");
  expect_true(memory_use().held <= (size_t{32} << 20), "one region stays at most");

  // The same block again: what is executed time after time finds its pages touched.
  void* first = allocate(size_t{3} << 20, 64);
  deallocate(first);
  void* again = allocate(size_t{3} << 20, 64);
  expect_true(first == again, "freed memory is given again");
  // More than a region holds.
  void* large = allocate(size_t{70} << 20, 4096);
  expect_true(large != nullptr && memory_use().held >= (size_t{102} << 20), "a region of its own");
  deallocate(large);
  deallocate(again);
  deallocate(nullptr);
  expect_true(memory_use().used == 0 && memory_use().held <= (size_t{32} << 20), "it goes back to the system");
  expect_true(allocate(SIZE_MAX - 5, 64) == nullptr, "what cannot be had is null");
  expect_true(allocate(size_t{1} << 20, size_t{1} << 40) == nullptr, "nor such an alignment");
  num_checks += checks;
}

}  // namespace edgeweave::tests
