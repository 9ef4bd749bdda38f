#include "runtime/numeric.h"

#include <stdexcept>
#include <string>

namespace zeroplan {

void refuse_storage(DType type) {
  throw std::logic_error("with_storage: " + std::string(to_string(type)) + " is not a floating-point type");
}

}  // namespace zeroplan
