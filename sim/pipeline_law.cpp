#include "sim/pipeline_law.h"

#include <algorithm>

namespace zeroplan {

Seconds pipeline_transfer(const PipelineLaw& law, Bytes message, Bytes wire, BytesPerSecond rate, int passes) {
  if (!(message > Bytes())) return {};
  const double unfilled = std::min(message, law.pipe) / message;
  return wire / rate * (1 + passes * law.fill * unfilled);
}

}  // namespace zeroplan
