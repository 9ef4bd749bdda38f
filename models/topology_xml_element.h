#pragma once
// XML elements that know their line, over pugixml. Only the topology reader includes this.

#include <cstddef>
#include <initializer_list>
#include <pugixml.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

/// Line numbers of offsets.
class XmlLines {
 public:
  explicit XmlLines(std::string_view text);
  int of(std::ptrdiff_t offset) const;

 private:
  std::vector<std::size_t> ends_;
};

/// One element, with checked access. Every failure is an InputError with the line, the element and the attribute. Lines
/// and file name must outlive it.
class XmlElement {
 public:
  XmlElement(pugi::xml_node node, const XmlLines& lines, const std::string& file)
      : node_(node), lines_(&lines), file_(&file) {}

  std::string_view name() const { return node_.name(); }
  int line() const { return lines_->of(node_.offset_debug()); }
  bool has(const char* attribute) const { return !node_.attribute(attribute).empty(); }
  [[noreturn]] void fail(std::string_view message) const;

  /// The value of an attribute that must be there. Ranges are inclusive.
  std::string text(const char* attribute) const;
  int integer(const char* attribute, int low, int high) const;
  double real(const char* attribute, double low, double high) const;

  /// The elements inside; text between them, an unknown one or an attribute given twice is an error.
  std::vector<XmlElement> children(std::initializer_list<std::string_view> known) const;
  void check_attributes() const;
  /// Names of the attributes that are not among these.
  std::vector<std::string> other_attributes(std::initializer_list<std::string_view> known) const;

 private:
  pugi::xml_node node_;
  const XmlLines* lines_;
  const std::string* file_;
};

}  // namespace zeroplan
