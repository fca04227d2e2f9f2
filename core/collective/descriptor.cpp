#include "collective/descriptor.h"

#include <cstring>

#include "base/text.h"
#include "collective/kinds.h"

namespace multiring {

void Descriptor::set_name(std::string_view text) {
  key.name_hash = text.empty() ? 0 : hash_name(text);
  const std::size_t length = cut_length(text, kNameBytes - 1);
  std::memcpy(name.data(), text.data(), length);
  name[length] = '\0';
}

std::string_view Descriptor::name_view() const { return {name.data(), ::strnlen(name.data(), kNameBytes)}; }

std::uint64_t hash_name(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash == 0 ? 1 : hash;  // 0 means no name
}

bool same_key(const MatchKey& a, const MatchKey& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

bool is_plausible(const Descriptor& descriptor) {
  return descriptor.key.kind < OpKind::kCount && static_cast<int>(descriptor.key.op) < kReduceOpCount &&
         static_cast<int>(descriptor.key.comm_dtype) < kCommDtypeCount &&
         static_cast<int>(descriptor.key.order) < kOrderCount &&
         static_cast<int>(descriptor.dtype) < kDTypeCount && descriptor.dims <= Descriptor::kMaxDims;
}

bool is_whole_array(const Descriptor& descriptor) {
  std::uint64_t bytes = dtype_size(descriptor.dtype);
  for (int dim = 0; dim < descriptor.dims; ++dim)
    if (const std::uint64_t extent = descriptor.shape[static_cast<std::size_t>(dim)]; extent == 0)
      return descriptor.bytes == 0;
    else if (__builtin_mul_overflow(bytes, extent, &bytes))
      return false;
  return descriptor.bytes == bytes;
}

bool takes_any_array(const Descriptor& descriptor) {
  return descriptor.key.kind == OpKind::kReceive && descriptor.dims == 0 && descriptor.bytes == 0;
}

namespace {

std::string root_of(const Descriptor& descriptor) {
  if (descriptor.key.kind == OpKind::kSend) return " to rank ";
  return descriptor.key.kind == OpKind::kReceive ? " from rank " : " root ";
}

}  // namespace

std::string describe(const Descriptor& descriptor) {
  const OpTraits& traits = traits_of(descriptor);
  std::string text = traits.name;
  if (!descriptor.name_view().empty()) text += " '" + std::string(descriptor.name_view()) + "'";
  if (descriptor.key.fused > 1) text += " (" + std::to_string(descriptor.key.fused) + " fused)";
  if (traits.reduces) {
    text += std::string(" ") + reduce_op_name(descriptor.key.op);
    if (descriptor.key.prescale != 1.0) text += " prescale " + std::to_string(descriptor.key.prescale);
    if (descriptor.key.postscale != 1.0) text += " postscale " + std::to_string(descriptor.key.postscale);
  }
  if (is_rounded(descriptor.key.comm_dtype))
    text += std::string(" comm_dtype ") + comm_dtype_name(descriptor.key.comm_dtype);
  if (descriptor.key.order == Order::kAny) text += " in any order";
  if (descriptor.key.root >= 0) text += root_of(descriptor) + std::to_string(descriptor.key.root);
  if (!traits.has_array || takes_any_array(descriptor)) return text;
  text += std::string(" ") + dtype_name(descriptor.dtype) + "[";
  for (int dim = 0; dim < descriptor.dims; ++dim)
    text += (dim > 0 ? ", " : "") + std::to_string(descriptor.shape[static_cast<std::size_t>(dim)]);
  return text + "]";
}

}  // namespace multiring
