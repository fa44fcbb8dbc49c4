// The kernels on hard graphs, against a float64 reference, with neither Python nor torch: for sanitizers and emulators.
//
// Every instruction set that the CPU has is tried in a process of its own, since one is picked per process. The exit
// status is the number of those that failed.
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <stdexcept>

#include "cases.h"

namespace edgeweave::tests {

Where where;
int64_t num_checks = 0;

void print_where() {
  static const char* const kNames[] = {"f32", "f64", "bf16", "f16", "i8", "u8", "i16", "i32", "i64"};
  std::fprintf(stderr,
               "[%s] in %s: graph '%s', %s, %s indices, %lld features, %lld heads, padding %lld, shift %lld%s%s\n",
               kernels().name, where.kernel, where.graph, kNames[where.dtype], where.wide ? "int64" : "int32",
               static_cast<long long>(where.features), static_cast<long long>(where.heads),
               static_cast<long long>(where.padding), static_cast<long long>(where.shift),
               where.weighted ? ", weighted" : "", where.special ? ", special values" : "");
}

void fail_at(const char* what, int64_t row, int64_t feature, double got, double expected) {
  print_where();
  std::fprintf(stderr, "%s: at [%lld, %lld] got %.17g, expected %.17g\n", what, static_cast<long long>(row),
               static_cast<long long>(feature), got, expected);
  std::_Exit(1);
}

namespace {

extern "C" void on_signal(int signal) {
  std::fprintf(stderr, "signal %d\n", signal);
  print_where();
  std::_Exit(1);
}

int run_all(const char* isa) {
  setenv("EDGEWEAVE_ISA", isa, 1);
#if !defined(__SANITIZE_ADDRESS__)
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) std::signal(signal, &on_signal);
#endif
  if (std::string(kernels().name) != isa) {
    std::fprintf(stderr, "EDGEWEAVE_ISA=%s picked %s\n", isa, kernels().name);
    return 1;
  }
  test_gather();
  test_sums();
  test_minmax();
  test_edges();
  test_family();
  test_pool();
  test_dense();
  std::printf("%s: %lld numbers compared, all equal\n", isa, static_cast<long long>(num_checks));
  return std::fflush(stdout);
}

bool unknown_isas_are_refused() {
  setenv("EDGEWEAVE_ISA", "abacus", 1);
  try {
    kernels();
  } catch (const std::invalid_argument&) {
    return true;
  }
  std::fprintf(stderr, "EDGEWEAVE_ISA=abacus was accepted\n");
  return false;
}

}  // namespace
}  // namespace edgeweave::tests

// Called by the sanitizers before they end the program.
extern "C" void __asan_on_error() { edgeweave::tests::print_where(); }
extern "C" void __ubsan_on_report() { edgeweave::tests::print_where(); }

int main() {
  using namespace edgeweave;
  int failures = tests::unknown_isas_are_refused() ? 0 : 1;
  std::vector<pid_t> children;
  for (const std::string& isa : supported_isas()) {
    const pid_t child = fork();
    if (child == 0) std::exit(tests::run_all(isa.c_str()));
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) ++failures;
  }
  return failures;
}
