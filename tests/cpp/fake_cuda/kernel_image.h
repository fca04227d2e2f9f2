#pragma once

namespace multiring::testing {

/// What the stand-in for NVRTC makes of the kernel for a dtype, by its number.
inline constexpr const char* kFakeImage = "kernel for dtype %d";
/// Of the devices: 9.0.
inline constexpr int kFakeCapability = 90;

}  // namespace multiring::testing
