#include "collective/agreement/round_exchange.h"

namespace multiring {

void RoundExchange::synchronise(const OperationCall& call) {
  transport_.arrive(round(), staged_);
  const WaitResult result = transport_.await_all(round(), call.waiting);
  if (!result.ok()) throw_for(call, result);
}

void RoundExchange::synchronise_again(const OperationCall& call) {
  transport_.arrive(round(), staged_);
  call.waiting.deadline.start();  // or only the copy's clock would run, anew each time
  WaitOptions waiting = call.waiting;
  waiting.brief = true;
  const WaitResult result = transport_.await_all(round(), waiting);
  if (!result.ok()) throw_for(call, result);
}

void RoundExchange::require_match(const OperationCall& call) const {
  const int garbled = board_.find([this](int peer) { return !is_plausible(board_.of(peer)); });
  if (garbled >= 0) throw_corrupt(call, garbled);
  if (agreement_.all_match()) return;
  if (!agreement_.all(&Descriptor::asynchronous)) throw_mismatch(call);
  const bool alike = agreement_.same(&Descriptor::submitted);
  const bool may_choose_otherwise =
      agreement_.any([](const Descriptor& each) { return each.key.fused > 1 || each.held_back; });
  if (alike && !may_choose_otherwise) throw_mismatch(call);
  throw ChoiceMismatch{agreement_.least(&Descriptor::submitted), alike};
}

}  // namespace multiring
