#include "switchyard/c.h"

uint32_t sy_abi_version() { return SY_ABI_VERSION; }
const char* sy_version() { return SWITCHYARD_VERSION; }
int32_t sy_has_cuda() { return SWITCHYARD_HAS_GPU; }
