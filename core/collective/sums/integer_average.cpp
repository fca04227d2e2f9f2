#include "collective/sums/integer_average.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/arithmetic/kernels/copy.h"
#include "base/cache.h"
#include "collective/kinds.h"
#include "collective/sums/piece_list.h"

namespace multiring {
namespace {

__extension__ typedef __int128 Int128;

template <typename T>
constexpr std::size_t kLimbs = sizeof(T) < 8 ? 1 : 2;

template <typename T>
void widen(const T* from, std::int64_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (kLimbs<T> == 1) {
      to[i] = static_cast<std::int64_t>(from[i]);
    } else {
      to[2 * i] = static_cast<std::int64_t>(from[i] >> 32);
      to[2 * i + 1] = static_cast<std::int64_t>(static_cast<std::uint64_t>(from[i]) & 0xffffffffU);
    }
  }
}

template <typename T>
void divide(const std::int64_t* from, T* to, std::size_t count, int divisor) {
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (kLimbs<T> == 1) {
      to[i] = static_cast<T>(from[i] / divisor);
    } else {
      const Int128 sum = static_cast<Int128>(from[2 * i]) * (Int128{1} << 32) + from[2 * i + 1];
      to[i] = static_cast<T>(sum / divisor);
    }
  }
}

/// Multiplies as reduce() defines it for integers.
template <typename T>
void scale(DType dtype, T* data, std::size_t count, double factor) {
  if (factor == 1.0) return;
  const void* const inputs[] = {data};
  void* const outputs[] = {data};
  reduce(dtype, {ReduceOp::kSum, factor}, inputs, outputs, count);
}

/// Calls body(range) for `bytes` bytes in blocks.
template <typename T, class Body>
void for_each_block(std::size_t bytes, const Body& body) {
  for (std::size_t begin = 0; begin < bytes; begin += kCachedElements * sizeof(T))
    body(Range{begin, std::min(begin + kCachedElements * sizeof(T), bytes)});
}

template <typename T>
void average(Exchange& exchange, const OperationCall& call, Operation& operation) {
  const Descriptor& descriptor = operation.descriptor;
  constexpr std::size_t kGrowth = kLimbs<T> * sizeof(std::int64_t) / sizeof(T);
  Operation* const operations[] = {&operation};
  const PieceList pieces(operations);
  std::vector<std::int64_t> wide(descriptor.bytes / sizeof(T) * kLimbs<T>);
  T block[kCachedElements];
  std::size_t cursor = 0;
  for_each_block<T>(descriptor.bytes, [&](Range range) {
    const std::size_t count = range.size() / sizeof(T);
    pieces.read(cursor, range, reinterpret_cast<std::byte*>(block));
    scale(descriptor.dtype, block, count, descriptor.key.prescale);
    widen(block, wide.data() + range.begin / sizeof(T) * kLimbs<T>, count);
  });

  const bool scatters = descriptor.key.kind == OpKind::kReduceScatter;
  Operation sums;
  sums.descriptor = descriptor;
  sums.descriptor.bytes *= kGrowth;
  sums.descriptor.input_region = sums.descriptor.output_region = 0;
  sums.is_widened = true;
  sums.input = reinterpret_cast<const std::byte*>(wide.data());
  if (!scatters) sums.output = reinterpret_cast<std::byte*>(wide.data());
  traits_of(descriptor).run(exchange, call, sums);

  const std::size_t bytes = scatters ? sums.result.bytes() / kGrowth : descriptor.bytes;
  operation.received = sums.received;
  if (scatters && operation.output == nullptr) {
    operation.result.allocate(bytes);
    operation.output = operation.result.data();
  }
  const auto* const sum = reinterpret_cast<const std::int64_t*>(sums.output);
  cursor = 0;
  for_each_block<T>(bytes, [&](Range range) {
    const std::size_t count = range.size() / sizeof(T);
    divide(sum + range.begin / sizeof(T) * kLimbs<T>, block, count, exchange.size());
    scale(descriptor.dtype, block, count, descriptor.key.postscale);
    if (scatters)
      copy_bytes(operation.output + range.begin, block, range.size());
    else
      pieces.write(cursor, range, reinterpret_cast<const std::byte*>(block));
  });
}

}  // namespace

bool averages_integers(const Descriptor& descriptor) {
  return descriptor.key.op == ReduceOp::kAverage && !is_floating(descriptor.dtype) &&
         descriptor.dtype != DType::kBool;
}

void average_integers(Exchange& exchange, const OperationCall& call, Operation& operation) {
  // In the order of DType.
  static constexpr void (*kAverages[])(Exchange&, const OperationCall&, Operation&) = {
      average<std::int8_t>,  average<std::uint8_t>,  average<std::int16_t>, average<std::uint16_t>,
      average<std::int32_t>, average<std::uint32_t>, average<std::int64_t>, average<std::uint64_t>};
  static_assert(static_cast<int>(DType::kInt8) + 7 == static_cast<int>(DType::kUInt64));
  const auto index =
      static_cast<std::size_t>(operation.descriptor.dtype) - static_cast<std::size_t>(DType::kInt8);
  if (index >= std::size(kAverages))
    throw Error(ErrorKind::kInternal, "no average of integers of this dtype");
  kAverages[index](exchange, call, operation);
}

}  // namespace multiring
