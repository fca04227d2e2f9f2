#include "base/job_settings.h"

#include <cctype>
#include <type_traits>

namespace multiring {
namespace {

std::string variable_of(const char* name) {
  std::string variable = "MULTIRING_";
  for (; *name != '\0'; ++name)
    variable += static_cast<char>(std::toupper(static_cast<unsigned char>(*name)));
  return variable;
}

std::string text_of(const std::string& value) { return value; }
std::string text_of(CommDtype value) { return comm_dtype_name(value); }
std::string text_of(HostLinks value) { return host_links_name(value); }
std::string text_of(Order value) { return order_name(value); }
std::string text_of(NcclScope value) { return nccl_scope_name(value); }
std::string text_of(const std::vector<std::string>& values) {
  std::string text;
  for (const std::string& value : values) text += (text.empty() ? "" : ",") + value;
  return text;
}
template <class Number>
  requires std::is_arithmetic_v<Number>
std::string text_of(Number value) {
  return std::to_string(value);
}

}  // namespace

std::map<std::string, std::string> values_of_job(const JobSettings& settings) {
  std::map<std::string, std::string> values;
  visit_settings([&](const char* name, auto member, SettingScope scope) {
    if (scope == SettingScope::kJob) values[variable_of(name)] = text_of(settings.*member);
  });
  return values;
}

}  // namespace multiring
