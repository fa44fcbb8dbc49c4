#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

#define EW_DECLARE_SELDOM(isa)        \
  namespace edgeweave::isa {          \
  void fill_arg(KernelTable& table);  \
  void fill_prod(FamilyTable& table); \
  }  // namespace edgeweave::isa

#define EW_DECLARE_ISA(isa)                  \
  namespace edgeweave::isa {                 \
  void fill_sum(KernelTable& table);         \
  void fill_minmax(KernelTable& table);      \
  void fill_minmax_grad(KernelTable& table); \
  void fill_dot(KernelTable& table);         \
  void fill_gather(KernelTable& table);      \
  IndexKernels index_kernels();              \
  FloatKernels float_kernels();              \
  PairKernels pair_kernels();                \
  inline void fill(KernelTable& table) {     \
    table.name = #isa;                       \
    fill_sum(table);                         \
    fill_minmax(table);                      \
    fill_minmax_grad(table);                 \
    fill_arg(table);                         \
    fill_dot(table);                         \
    fill_gather(table);                      \
  }                                          \
  void fill_entries(FamilyTable& table);     \
  void fill_softmax(FamilyTable& table);     \
  void fill_multi(FamilyTable& table);       \
  void fill_pair(FamilyTable& table);        \
  void fill_attention(FamilyTable& table);   \
  inline void fill(FamilyTable& table) {     \
    fill_entries(table);                     \
    fill_softmax(table);                     \
    fill_prod(table);                        \
    fill_multi(table);                       \
    fill_pair(table);                        \
    fill_attention(table);                   \
  }                                          \
  }  // namespace edgeweave::isa

#if defined(__x86_64__)
EW_DECLARE_SELDOM(baseline)
EW_DECLARE_ISA(baseline)
EW_DECLARE_SELDOM(avx2)
EW_DECLARE_ISA(avx2)
namespace edgeweave::avx512 {
using avx2::fill_arg;  // CMakeLists.txt compiles them without AVX-512
using avx2::fill_prod;
}  // namespace edgeweave::avx512
EW_DECLARE_ISA(avx512)
#elif defined(__aarch64__)
EW_DECLARE_SELDOM(neon)
EW_DECLARE_ISA(neon)
#else
EW_DECLARE_SELDOM(baseline)
EW_DECLARE_ISA(baseline)
#endif

namespace edgeweave {
namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  void (*fill)(KernelTable&);
  void (*fill_family)(FamilyTable&);
  IndexKernels (*index)();
  FloatKernels (*floats)();
  PairKernels (*pairs)();
};

bool always() { return true; }

// Best first. The last one is compiled for the architecture's baseline and always runs.
#if defined(__x86_64__)
const Isa kIsas[] = {
    {"avx512", [] { return __builtin_cpu_supports("x86-64-v4") != 0; }, &avx512::fill, &avx512::fill,
     &avx512::index_kernels, &avx512::float_kernels, &avx512::pair_kernels},
    {"avx2", [] { return __builtin_cpu_supports("x86-64-v3") != 0; }, &avx2::fill, &avx2::fill, &avx2::index_kernels,
     &avx2::float_kernels, &avx2::pair_kernels},
    {"baseline", &always, &baseline::fill, &baseline::fill, &baseline::index_kernels, &baseline::float_kernels,
     &baseline::pair_kernels},
};
template <class Table>
void fill_baseline(Table& table) {
  baseline::fill(table);
}
#elif defined(__aarch64__)
const Isa kIsas[] = {
    {"neon", &always, &neon::fill, &neon::fill, &neon::index_kernels, &neon::float_kernels, &neon::pair_kernels}};
template <class Table>
void fill_baseline(Table& table) {
  neon::fill(table);
}
#else
const Isa kIsas[] = {{"baseline", &always, &baseline::fill, &baseline::fill, &baseline::index_kernels,
                      &baseline::float_kernels, &baseline::pair_kernels}};
template <class Table>
void fill_baseline(Table& table) {
  baseline::fill(table);
}
#endif

std::string joined_supported() {
  std::string names;
  for (const std::string& name : supported_isas()) names += (names.empty() ? "" : ", ") + name;
  return names;
}

const Isa& choose() {
  const char* forced = std::getenv("EDGEWEAVE_ISA");
  if (forced == nullptr || *forced == '\0') {
    for (const Isa& isa : kIsas) {
      if (isa.runs_here()) return isa;
    }
  }
  for (const Isa& isa : kIsas) {
    if (std::string(isa.name) != forced) continue;
    if (isa.runs_here()) return isa;
    throw std::invalid_argument("edgeweave: EDGEWEAVE_ISA must name an instruction set that this CPU has, got '" +
                                std::string(forced) + "'; it can run: " + joined_supported());
  }
  throw std::invalid_argument("edgeweave: EDGEWEAVE_ISA must be one of the instruction sets of this build, got '" +
                              std::string(forced) + "'; this CPU can run: " + joined_supported());
}

const Isa& chosen() {
  static const Isa& isa = choose();
  return isa;
}

KernelTable make_table() {
  const Isa& isa = chosen();
  KernelTable table{};
  fill_baseline(table);  // integer kernels exist once, in the baseline
  isa.fill(table);
  return table;
}

FamilyTable make_family_table() {
  FamilyTable table{};
  fill_baseline(table);
  chosen().fill_family(table);
  return table;
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if (isa.runs_here()) names.emplace_back(isa.name);
  }
  return names;
}

const KernelTable& kernels() {
  static const KernelTable table = make_table();
  return table;
}

const FamilyTable& family_kernels() {
  static const FamilyTable table = make_family_table();
  return table;
}

const IndexKernels& index_kernels() {
  static const IndexKernels table = chosen().index();
  return table;
}

const FloatKernels& float_kernels() {
  static const FloatKernels table = chosen().floats();
  return table;
}

const PairKernels& pair_kernels() {
  static const PairKernels table = chosen().pairs();
  return table;
}

}  // namespace edgeweave
