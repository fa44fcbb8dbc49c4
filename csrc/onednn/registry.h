// Objects behind integer handles. A handle is never used twice, so that a stale one is an error.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace edgeweave::onednn {

template <class T>
class Registry {
 public:
  explicit Registry(const char* what) : what_(what) {}

  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> guard(mutex_);
    objects_.emplace(++last_, std::move(object));
    return last_;
  }
  std::shared_ptr<T> find(int64_t handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end())
      throw std::invalid_argument(std::string(what_) + " has handle " + std::to_string(handle));
    return found->second;
  }
  void release(int64_t handle) {
    std::shared_ptr<T> dropped;  // destroyed after the lock is gone
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return;
    dropped = std::move(found->second);
    objects_.erase(found);
  }

 private:
  const char* what_;
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
  int64_t last_ = 0;
};

}  // namespace edgeweave::onednn
