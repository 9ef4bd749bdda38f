#pragma once

namespace zeroplan {

/// std::visit(overloaded{...}): a variant without a case does not compile.
template <class... Ts>
struct overloaded : Ts... {
  using Ts::operator()...;
};
template <class... Ts>
overloaded(Ts...) -> overloaded<Ts...>;

}  // namespace zeroplan
