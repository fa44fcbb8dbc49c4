// Whether AMX can be used. Compiled without it.
#include <string>

#include "../dispatch/dispatch.h"
#include "amx.h"

#if EDGEWEAVE_WITH_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace edgeweave {

#if EDGEWEAVE_WITH_AMX

namespace amx {
AmxKernels kernels();
}

namespace {

bool processor_has_amx() {
  constexpr unsigned kBf16Tiles = 1u << 22, kTiles = 1u << 24;  // leaf 7, edx
  constexpr unsigned kBf16Vectors = 1u << 5;                    // leaf 7 subleaf 1, eax
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16Tiles) == 0 || (d & kTiles) == 0) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kBf16Vectors) != 0;
}

// Linux grants the tiles' 8 KiB of state to a process that asks; all its threads have them then.
bool system_permits_amx() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace

const AmxKernels* amx_kernels() {
  static const AmxKernels table = amx::kernels();
  // A smaller instruction set that the user asked for counts here too.
  static const bool usable =
      std::string(edgeweave::kernels().name) == "avx512" && processor_has_amx() && system_permits_amx();
  return usable ? &table : nullptr;
}

#else

const AmxKernels* amx_kernels() { return nullptr; }

#endif

}  // namespace edgeweave
