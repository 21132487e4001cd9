// Six batching policies, stepped through a set of requests with a clock: what `mooncake_lab.batching` does, for the
// browser. A test runs random requests through both and compares every iteration (tests/site/test_drag_requests.py).
//
// A request: {id, arrivalS, promptTokens, outputTokens, maxNewTokens}. Limits: {maxBatchTokens, maxRequests,
// blockTokens, capacityBlocks}. Latency: the coefficients of `perf.latency.HybridLatency`, by their Python names.
(() => {
  const known = (r) => r.promptTokens + r.generated;
  const pending = (r) => known(r) - r.cached;
  const decoding = (r) => r.generated > 0 && pending(r) === 1;
  const inOrder = (a, b) => a.arrivalS - b.arrivalS || a.id - b.id;

  // --- blocks that a running request may count on -------------------------------------------------------------------
  const knownBlocks = (r, limits) => Math.ceil(known(r) / limits.blockTokens);
  const longest = (r) => r.promptTokens + r.maxNewTokens - 1; // the last token is never written
  const worstCaseBlocks = (r, limits) => {
    const tokens = Math.min(limits.capacityBlocks * limits.blockTokens, longest(r));
    return Math.ceil(Math.max(known(r), tokens) / limits.blockTokens);
  };
  const neverFits = (r, limits) => Math.max(known(r), longest(r)) > limits.capacityBlocks * limits.blockTokens;
  const neverFitsWhole = (r, limits) => (!r.generated && pending(r) > limits.maxBatchTokens) || neverFits(r, limits);

  // --- one iteration in the making: counts tokens, places and blocks ------------------------------------------------
  class Draft {
    constructor(running, limits, promise, { watermark = 0, budget = limits.maxBatchTokens } = {}) {
      Object.assign(this, { limits, promise, running: [], unfinished: [], segments: [], preempted: [], rejected: [] });
      this.tokensLeft = Math.min(budget, limits.maxBatchTokens);
      this.kept = Math.floor(watermark * limits.capacityBlocks);
      this.blocksLeft = limits.capacityBlocks - running.reduce((sum, r) => sum + r.held, 0);
      for (const r of running) {
        if (known(r) > limits.capacityBlocks * limits.blockTokens) {
          this.rejected.push(r.id);
          this.refusesRunning = true;
          this.blocksLeft += r.held;
          continue;
        }
        this.blocksLeft -= this.missing(r);
        this.running.push(r);
        if (!decoding(r)) this.unfinished.push(r);
      }
    }

    missing(r) {
      return Math.max(this.promise(r, this.limits) - r.held, 0);
    }

    makeRoom() { // the newest lose their blocks; their tokens are computed again
      while (this.blocksLeft < 0 && this.running.length > 1) {
        const victim = this.running.pop();
        if (this.unfinished.at(-1) === victim) this.unfinished.pop();
        this.blocksLeft += this.missing(victim) + victim.held;
        this.preempted.push(victim.id);
      }
    }

    advance(r, tokens) {
      const count = Math.max(Math.min(pending(r), tokens, this.tokensLeft), 0);
      if (count) {
        const kind = decoding(r) ? "decode" : "prefill";
        this.segments.push({ id: r.id, kind, tokens: count, cached: r.cached, emits: count === pending(r) });
        this.tokensLeft -= count;
      }
      return count;
    }

    decode() {
      for (const r of this.running) if (decoding(r)) this.advance(r, 1);
    }

    * candidates(waiting, refuse = neverFits) { // first come, first served; none if a running request loses its place
      if (this.preempted.length || this.refusesRunning) return;
      for (const r of waiting) {
        if (this.running.length >= this.limits.maxRequests) return;
        if (refuse(r, this.limits)) {
          this.rejected.push(r.id);
          continue;
        }
        if (this.missing(r) > this.blocksLeft - (this.running.length ? this.kept : 0)) return;
        yield r;
      }
    }

    admit(r, tokens) {
      const count = this.advance(r, tokens);
      if (count) {
        this.blocksLeft -= this.missing(r);
        this.running.push(r);
      }
      return count;
    }

    fillWithPieces(waiting) {
      for (const r of this.unfinished) this.advance(r, pending(r));
      for (const r of this.candidates(waiting)) if (!this.admit(r, pending(r))) return;
    }

    fillWithWholePrompts(waiting) {
      for (const r of this.candidates(waiting, neverFitsWhole)) {
        const resumedAlone = r.generated > 0 && !this.segments.length;
        if (pending(r) > this.tokensLeft && !resumedAlone) return;
        this.admit(r, pending(r));
      }
    }
  }

  // --- the policies: (waiting, running, limits, chunk) to a finished draft --------------------------------------------
  const POLICIES = {
    request_level(waiting, running, limits) {
      const draft = new Draft(running, limits, worstCaseBlocks);
      if (!draft.running.length) draft.fillWithWholePrompts(waiting);
      else if (draft.unfinished.length) for (const r of draft.unfinished) draft.advance(r, pending(r));
      else draft.decode();
      return draft;
    },
    orca(waiting, running, limits) {
      const draft = new Draft(running, limits, worstCaseBlocks);
      for (const r of draft.running) draft.advance(r, draft.tokensLeft);
      draft.fillWithWholePrompts(waiting);
      return draft;
    },
    vllm(waiting, running, limits) {
      const draft = new Draft(running, limits, knownBlocks, { watermark: 0.01 });
      draft.makeRoom();
      for (const r of draft.unfinished) draft.advance(r, pending(r));
      draft.fillWithWholePrompts(waiting);
      if (!draft.segments.length) draft.decode();
      return draft;
    },
    sarathi(waiting, running, limits, chunk) {
      const draft = new Draft(running, limits, worstCaseBlocks);
      draft.decode();
      const piece = Math.min(chunk, limits.maxBatchTokens) - draft.segments.length;
      if (draft.unfinished.length) draft.advance(draft.unfinished[0], piece);
      else for (const r of draft.candidates(waiting)) { draft.admit(r, piece); break; }
      draft.segments.sort((a, b) => (a.kind === "decode") - (b.kind === "decode"));
      return draft;
    },
    sarathi_serve(waiting, running, limits, chunk) {
      const draft = new Draft(running, limits, knownBlocks, { watermark: 0.01 });
      draft.makeRoom();
      draft.decode();
      draft.tokensLeft = Math.min(Math.min(chunk, limits.maxBatchTokens) - draft.segments.length, draft.tokensLeft);
      draft.fillWithPieces(waiting);
      return draft;
    },
    vllm_chunked(waiting, running, limits, chunk) {
      const draft = new Draft(running, limits, knownBlocks, { watermark: 0.01, budget: chunk });
      draft.makeRoom();
      draft.decode();
      draft.fillWithPieces(waiting);
      return draft;
    },
  };

  // --- the clock ------------------------------------------------------------------------------------------------------
  const seconds = (segments, latency) => {
    if (!segments.length) return 0;
    const prefills = segments.filter((s) => s.kind === "prefill");
    const decodes = segments.filter((s) => s.kind === "decode");
    const sum = (list, of) => list.reduce((total, each) => total + of(each), 0);
    const tiles = Math.ceil(sum(segments, (s) => s.tokens) / latency.tile_tokens) * latency.tile_tokens;
    return latency.constant_s + Math.max(latency.floor_s, latency.per_token_s * tiles)
      + latency.per_request_s * decodes.length
      + latency.per_token_squared_s * sum(prefills, (s) => s.tokens * (2 * s.cached + s.tokens))
      + latency.per_context_token_s * sum(decodes, (s) => s.cached)
      + latency.host_s * Math.max(0, decodes.length - latency.host_free);
  };

  // Run a policy until every request is finished or refused: iterations with their times, in order.
  const replay = (policy, requests, limits, latency, chunk) => {
    const coming = requests.map((r) => ({ ...r, cached: 0, generated: 0, held: 0 })).sort(inOrder);
    let waiting = [], running = [], now = 0;
    const log = [];
    while (coming.length || waiting.length || running.length) {
      if (!waiting.length && !running.length) now = Math.max(now, coming[0].arrivalS);
      while (coming.length && coming[0].arrivalS <= now) waiting.push(coming.shift());
      waiting.sort(inOrder);
      const draft = POLICIES[policy](waiting, running, limits, chunk);
      const { segments, preempted, rejected } = draft;
      if (!segments.length && !preempted.length && !rejected.length) throw new Error(`${policy} does nothing`);
      const step = { startS: now, segments, preempted, rejected, finished: [] };
      step.waiting = waiting.map((r) => r.id);
      step.running = running.map((r) => r.id);
      now += seconds(segments, latency);
      step.endS = now;
      const here = new Map([...waiting, ...running].map((r) => [r.id, r]));
      const moved = new Set([...segments.map((s) => s.id), ...preempted, ...rejected]);
      waiting = waiting.filter((r) => !moved.has(r.id));
      running = running.filter((r) => !moved.has(r.id));
      for (const id of preempted) waiting.push({ ...here.get(id), cached: 0, held: 0 });
      for (const s of segments) {
        const r = { ...here.get(s.id), cached: s.cached + s.tokens };
        r.generated += s.emits;
        r.held = Math.ceil(r.cached / limits.blockTokens);
        if (r.generated < r.outputTokens) running.push(r);
        else step.finished.push(r.id);
      }
      running.sort(inOrder);
      log.push(step);
    }
    return log;
  };

  // What a client sees of each request: seconds to its first token, and between its tokens.
  const latencies = (log, requests) => requests.map((request) => {
    const times = log.filter((step) => step.segments.some((s) => s.id === request.id && s.emits)).map((s) => s.endS);
    const gaps = times.slice(1).map((time, i) => time - times[i]);
    return {
      id: request.id,
      ttftS: times.length ? times[0] - request.arrivalS : null,
      meanTbtS: gaps.length ? gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length : null,
      longestTbtS: gaps.length ? Math.max(...gaps) : null,
      endS: times.length ? times.at(-1) : null,
    };
  });

  globalThis.MooncakeBatching = { POLICIES, replay, latencies };
})();
