#pragma once

#include <string>

#include "models/host_kernels.h"
#include "models/json_reader.h"

namespace zeroplan {

/// "host_kernels" of machine.json. Strict: unknown, missing and impossible values are InputErrors that point.
HostKernels read_host_kernels(const JsonValue& value);
/// One JSON object; what read_host_kernels() reads.
std::string write_host_kernels(const HostKernels& host);

}  // namespace zeroplan
