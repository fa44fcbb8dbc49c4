// Which kernels run: picked once, at first use, from the CPU's features or from EDGEWEAVE_ISA.
#pragma once

#include <string>
#include <vector>

#include "../dense/dense.h"
#include "../kernels/args.h"
#include "../kernels/family.h"
#include "../kernels/index.h"

namespace edgeweave {

// Kernels of the active ISA. Throws std::invalid_argument if EDGEWEAVE_ISA names none that this CPU can run.
const KernelTable& kernels();
const FamilyTable& family_kernels();
const IndexKernels& index_kernels();
const FloatKernels& float_kernels();
const PairKernels& pair_kernels();

// Names of the ISAs compiled in that this CPU can run, best first.
std::vector<std::string> supported_isas();

}  // namespace edgeweave
