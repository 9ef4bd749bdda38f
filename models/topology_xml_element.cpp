#include "models/topology_xml_element.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "models/error.h"
#include "models/topology_parts.h"

namespace zeroplan {

XmlLines::XmlLines(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n') ends_.push_back(i);
  }
}

int XmlLines::of(std::ptrdiff_t offset) const {
  const auto at = static_cast<std::size_t>(std::max<std::ptrdiff_t>(offset, 0));
  return 1 + static_cast<int>(std::ranges::lower_bound(ends_, at) - ends_.begin());
}

void XmlElement::fail(std::string_view message) const {
  fail_at(*file_, line(), fmt::format("<{}>: {}", name(), message));
}

std::string XmlElement::text(const char* attribute) const {
  if (!has(attribute)) fail(fmt::format("expected the attribute {}, found none", attribute));
  std::string value = node_.attribute(attribute).value();
  if (std::ranges::any_of(value, [](char c) { return c < 0x20 || c == 0x7f; })) {
    fail(fmt::format("{}: expected printable ASCII, found {}", attribute, found_text(value)));
  }
  return value;
}

int XmlElement::integer(const char* attribute, int low, int high) const {
  const std::string value = text(attribute);
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc{} && end == value.data() + value.size() && number >= low && number <= high) return number;
  fail(fmt::format("{}: expected a number from {} to {}, found {}", attribute, low, high, found_text(value)));
}

double XmlElement::real(const char* attribute, double low, double high) const {
  const std::string value = text(attribute);
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc{} && end == value.data() + value.size() && number >= low && number <= high) return number;
  fail(fmt::format("{}: expected a number from {} to {}, found {}", attribute, low, high, found_text(value)));
}

std::vector<XmlElement> XmlElement::children(std::initializer_list<std::string_view> known) const {
  std::vector<XmlElement> result;
  for (const pugi::xml_node child : node_.children()) {
    const XmlElement element(child, *lines_, *file_);
    if (child.type() != pugi::node_element) {
      const std::string_view value = child.value();
      const std::size_t blanks = std::min(value.find_first_not_of(" \t\r\n"), value.size());
      fail_at(
          *file_, lines_->of(child.offset_debug() + static_cast<std::ptrdiff_t>(blanks)),
          fmt::format("expected an element inside <{}>, found the text {}", name(), found_text(value.substr(blanks))));
    }
    if (std::ranges::find(known, element.name()) == known.end()) {
      const std::vector<std::string> names(known.begin(), known.end());
      element.fail(fmt::format("expected {} inside <{}>, found <{}>{}{}",
                               names.empty() ? "nothing" : fmt::format("<{}>", fmt::join(names, ">, <")), name(),
                               element.name(), names.empty() ? "" : ": ", did_you_mean(element.name(), names)));
    }
    element.check_attributes();
    result.push_back(element);
  }
  return result;
}

void XmlElement::check_attributes() const {
  std::vector<std::string_view> seen;
  for (const pugi::xml_attribute attribute : node_.attributes()) {
    if (std::ranges::find(seen, attribute.name()) != seen.end()) {
      fail(fmt::format("expected each attribute once, found {} again", attribute.name()));
    }
    seen.emplace_back(attribute.name());
  }
}

std::vector<std::string> XmlElement::other_attributes(std::initializer_list<std::string_view> known) const {
  std::vector<std::string> result;
  for (const pugi::xml_attribute attribute : node_.attributes()) {
    if (std::ranges::find(known, std::string_view(attribute.name())) == known.end()) {
      result.emplace_back(attribute.name());
    }
  }
  return result;
}

}  // namespace zeroplan
