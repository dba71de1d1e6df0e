-- Settings, status and what operators do: the twin of ledger/operator.py.

local function states(lane)
  local counts, total = {}, 0
  for _, state in ipairs(STATES) do
    counts[state] = number_in(lane, state)
    total = total + counts[state]
  end
  return counts, total
end

local function nodes()
  local leases = {}
  for _, id in ipairs(call('ZRANGE', P .. 'running', 0, -1)) do
    local node = group(id).node
    leases[node] = (leases[node] or 0) + 1
  end
  local reports, flat = {}, call('HGETALL', P .. 'nodes')
  for i = 1, #flat, 2 do
    local name, node = flat[i], cjson.decode(flat[i + 1])
    local wait = cjson.decode(call('HGET', P .. 'node_waits', name) or '{}')
    reports[#reports + 1] = {
      node_id = name, version = node.version, leases = leases[name] or 0,
      waiting_for = wait.waiting_for or '', waiting_ms = wait.waiting_ms or 0,
      seen_ms_ago = now - node.seen, load_percent = wait.load_percent or 0,
    }
  end
  table.sort(reports, function(a, b) return a.node_id < b.node_id end)
  return reports
end

local function trainer_wait()
  local open = {}
  for _, record in ipairs(call('HVALS', P .. 'batches')) do
    local batch = cmsgpack.unpack(record)
    if batch.since then open[#open + 1] = {batch.since, #batch.tasks, batch.wanted} end
  end
  table.sort(open, function(a, b)
    for i = 1, 3 do
      if a[i] ~= b[i] then return a[i] < b[i] end
    end
    return false
  end)
  local longest = open[1] or {now, 0, 0}
  return now - longest[1], longest[2], longest[3]
end

return reply({
  Configure = function()
    local layout = tonumber(call('HGET', P .. 'meta', 'layout') or 0)
    if not L.settings then
      set('layout', LAYOUT)
    elseif layout ~= LAYOUT then
      config('run.name = ' .. S.run_id .. ': redis holds it in layout ' .. layout .. ', and this '
        .. 'release has layout ' .. LAYOUT .. '; let the release that began the run end it, or '
        .. 'take another name')
    end
    local settings = cjson.encode(args.settings)
    if not L.settings or S.budget ~= args.settings.budget then
      set('budget', args.settings.budget)
      wake.tasks = true
    end
    if settings ~= L.settings then set('settings', settings) end
    if call('EXISTS', STREAM) == 0 then
      call('XGROUP', 'CREATE', STREAM, READERS, '0', 'MKSTREAM')
    end
    return {}
  end,

  Status = function()
    local train, enqueued = states('train')
    local totals, flat = {}, call('HGETALL', P .. 'counters')
    for i = 1, #flat, 2 do totals[flat[i]] = tonumber(flat[i + 1]) end
    local waiting_ms, has, wants = trainer_wait()
    local first = call('ZRANGE', P .. 'queued:train', 0, 0)[1]
    return {
      run_id = S.run_id, version = L.version, incarnation = L.incarnation, budget = L.budget,
      batch_groups = S.batch_groups, groups = train, enqueued = enqueued,
      eval_groups = (states('eval')), counters = totals, payload_bytes = L.bytes,
      nodes = nodes(), trainer_waiting_ms = waiting_ms, trainer_has = has, trainer_wants = wants,
      oldest_queued_ms = first and now - group(first).queued_at or 0,
      paused = L.paused == 1, draining = L.draining == 1,
      step_metrics = call('HGET', P .. 'meta', 'step_metrics') or '',
    }
  end,

  SetBudget = function()
    local previous = L.budget
    set('budget', args.budget)
    audit(args.actor, 'budget ' .. previous .. ' -> ' .. args.budget)
    wake.tasks = true
    return {previous = previous}
  end,

  Pause = function()
    set('paused', args.paused and 1 or 0)
    audit(args.actor, args.paused and 'pause' or 'resume')
    wake.tasks = true
    return {}
  end,

  Drain = function()
    set('draining', 1)
    audit(args.actor, 'drain')
    wake.tasks = true
    return {}
  end,

  Inspect = function()
    local id = call('HGET', P .. 'task_of', args.id) or args.id
    local g = group(id)
    if not g then return {task_id = ''} end
    return {task_id = id, state = g.state, attempts = g.attempts, reasons = g.reasons}
  end,

  ListDead = function()
    local tasks = {}
    local ids = args.limit > 0 and call('ZRANGE', P .. 'dead', 0, args.limit - 1) or {}
    for i, id in ipairs(ids) do tasks[i] = {task_id = id, reasons = group(id).reasons} end
    return {tasks = tasks}
  end,

  Requeue = function()
    local wanted, number = {}, 0
    for _, id in ipairs(args.task_ids) do wanted[id] = true end
    for _, id in ipairs(call('ZRANGE', P .. 'dead', 0, -1)) do
      local g = group(id)
      -- No node could generate those of producers.
      if (#args.task_ids == 0 or wanted[id]) and not g.external then
        g.failures = 0
        move(g, 'waiting')
        number = number + 1
      end
    end
    if number > 0 then audit(args.actor, 'requeue ' .. number) end
    return {count = number}
  end,

  ListAudit = function()
    local records = args.limit > 0 and call('LRANGE', P .. 'audit', 0, args.limit - 1) or {}
    for i, record in ipairs(records) do records[i] = cjson.decode(record) end
    return {records = records}
  end,
})
