// Reads the integers in which Python describes graphs and programs. Every read is bounded: a malformed description is
// an error, never a read past its end.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace edgeweave::onednn {

constexpr int64_t kMostDims = 12;  // DNNL_MAX_NDIMS

class Code {
 public:
  explicit Code(const std::vector<int64_t>& words) : words_(words) {}

  int64_t next() {
    if (at_ >= words_.size()) throw std::invalid_argument("oneDNN: description ends too early");
    return words_[at_++];
  }
  // In [0, limit).
  int64_t next_below(int64_t limit) {
    const int64_t value = next();
    if (value < 0 || value >= limit)
      throw std::invalid_argument("oneDNN: description has " + std::to_string(value) + " where less than " +
                                  std::to_string(limit) + " is possible");
    return value;
  }
  // How many entries follow; no more than there are words left.
  int64_t count() { return next_below(static_cast<int64_t>(words_.size() - at_) + 1); }
  double real() {
    const int64_t bits = next();
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  std::vector<int64_t> list() {
    const int64_t length = count();
    std::vector<int64_t> out;
    out.reserve(static_cast<size_t>(length));
    for (int64_t i = 0; i < length; ++i) out.push_back(next());
    return out;
  }
  std::string text() {
    std::string out;
    for (const int64_t c : list()) out.push_back(static_cast<char>(c));
    return out;
  }
  void finish() const {
    if (at_ != words_.size()) throw std::invalid_argument("oneDNN: description has words left over");
  }

 private:
  const std::vector<int64_t>& words_;
  size_t at_ = 0;
};

}  // namespace edgeweave::onednn
