-- The trainer's side, batches, commits, checkpoints, resumes: the twin of ledger/trainer.py.

local function batch_of(lane, trainer_id)
  local name = lane .. ':' .. trainer_id
  local record = call('HGET', P .. 'batches', name)
  local batch = record and cmsgpack.unpack(record)
  if batch then batch.name, batch.lane, batch.trainer_id = name, lane, trainer_id end
  return batch
end

local function save_batch(batch)
  call('HSET', P .. 'batches', batch.name, cmsgpack.pack({
    id = batch.id, budget = batch.budget, wanted = batch.wanted, tasks = batch.tasks,
    full = batch.full, opened = batch.opened, since = batch.since, untrained = batch.untrained,
  }))
end

local function find_batch(trainer_id, batch_id)
  for _, lane in ipairs(LANES) do
    local batch = batch_of(lane, trainer_id)
    if batch and batch.id == batch_id then return batch end
  end
end

-- The dequeue check; a group over the budget is masked, ended or counted.
local function passes(g, budget)
  local limit = L.version - budget
  g.mask_below = nil
  if not g.oldest or g.oldest >= limit then return true end
  if S.over_budget == 'keep' then
    count('kept_over_budget')
    return true
  end
  if S.over_budget == 'mask' and g.newest >= limit then
    count('masked')
    g.mask_below = limit
    return true
  end
  count_lengths('dropped', g)
  if S.over_budget == 'drop' and g.reissues < S.max_reissues and not g.external then
    count('reissued')
    g.reissues = g.reissues + 1
    drop_payloads(g)
    move(g, 'waiting')
  else
    end_untrained(g, 'stale')
  end
  return false
end

local function take(id, batch)
  local g = group(id)
  if batch.lane == 'eval' or passes(g, batch.budget) then
    move(g, 'leased')
    batch.tasks[#batch.tasks + 1] = id
  end
end

-- The entries of the batch's tasks in the stream, in parts.
local function entries_of(batch, first, act)
  local ids = {}
  for i = first, #batch.tasks do add_stream_ids(group(batch.tasks[i]), ids) end
  in_parts(ids, act)
end

-- FORCE: makes an entry pending although it was never read by XREADGROUP: age decides, not the
-- order of arrival.
local function claim(batch, first)
  entries_of(batch, first, function(...)
    local command = {'XCLAIM', STREAM, READERS, batch.trainer_id, 0, ...}
    command[#command + 1] = 'FORCE'
    command[#command + 1] = 'JUSTID'
    call(unpack(command))
  end)
end

local function acknowledge(batch)
  entries_of(batch, 1, function(...) call('XACK', STREAM, READERS, ...) end)
end

-- Running groups that fit the budget now and would be dropped after this batch.
local function awaited_by(batch)
  local impatient = now - batch.opened >= S.patience_ms
  if S.over_budget ~= 'drop' or batch.lane ~= 'train' or impatient then return 0 end
  local version = L.version - batch.budget
  return call('ZCOUNT', P .. 'admitted', version, version)
end

local function fill(batch, most)
  if #args.task_ids == 0 then
    while #batch.tasks < most do
      local oldest = call('ZRANGE', P .. 'queued:' .. batch.lane, 0, most - #batch.tasks - 1)
      if #oldest == 0 then break end
      for _, id in ipairs(oldest) do take(id, batch) end
    end
    return
  end
  local ready = {}
  for _, id in ipairs(args.task_ids) do
    local age = call('ZSCORE', P .. 'queued:' .. batch.lane, id)
    if age then ready[#ready + 1] = {age = tonumber(age), id = id} end
  end
  table.sort(ready, function(a, b) return a.age < b.age or (a.age == b.age and a.id < b.id) end)
  for _, entry in ipairs(ready) do
    if #batch.tasks >= most then break end
    take(entry.id, batch)
  end
end

local function ended_of(batch)
  local inside, ended = {}, 0
  for _, id in ipairs(batch.tasks) do inside[id] = true end
  for _, id in ipairs(args.task_ids) do
    if not inside[id] then
      local g = group(id)
      if not g or g.state == 'committed' or g.state == 'dead' then ended = ended + 1 end
    end
  end
  return ended
end

local function release(batch)
  add_untrained(batch.untrained.groups, batch.untrained.trajectories, batch.untrained.score_sum)
  acknowledge(batch)
  for _, id in ipairs(batch.tasks) do move(group(id), 'queued') end
  call('HDEL', P .. 'batches', batch.name)
end

local function group_lease(id)
  local g = group(id)
  local bytes = g.bytes + g.partial_bytes
  if not g.oldest then
    return {task_id = id, staleness = 0, in_flight = 0, payload_bytes = bytes}
  end
  return {task_id = id, staleness = L.version - g.oldest, in_flight = g.newest - g.oldest,
    payload_bytes = bytes, mask_below = g.mask_below}
end

return reply({
  LeaseBatch = function()
    fence(args.incarnation)
    if args.version ~= L.version then
      invalid('version = ' .. args.version .. ": the queue's is " .. L.version
        .. '; commit or resume')
    end
    tick()
    local batch = batch_of(args.lane, args.trainer_id) or {
      name = args.lane .. ':' .. args.trainer_id, lane = args.lane, trainer_id = args.trainer_id,
      id = args.batch_id, budget = L.budget, opened = now, tasks = {}, full = false,
      untrained = {groups = 0, trajectories = 0, score_sum = 0},
    }
    batch.wanted = #args.task_ids > 0 and #args.task_ids or args.groups
    local awaited, had = awaited_by(batch), #batch.tasks
    fill(batch, batch.wanted - awaited)
    claim(batch, had + 1)
    if not batch.full and #batch.tasks + ended_of(batch) >= batch.wanted then
      batch.full = true
      if args.lane == 'train' then
        batch.untrained = {groups = L.untrained_groups, trajectories = L.untrained_trajectories,
          score_sum = L.untrained_scores}
        set('untrained_groups', 0)
        set('untrained_trajectories', 0)
        set('untrained_scores', 0)
      end
    end
    if batch.full then batch.since = nil else batch.since = batch.since or now end
    save_batch(batch)
    local leases = {}
    for i, id in ipairs(batch.tasks) do leases[i] = group_lease(id) end
    return {
      batch_id = batch.id, groups = leases, budget = batch.budget, full = batch.full,
      untrained = batch.untrained, awaited = awaited, running = number_in(args.lane, 'running'),
      waiting = number_in(args.lane, 'waiting'), payload_bytes = L.bytes,
    }
  end,

  Fetch = function()
    local payloads = {}
    for i, id in ipairs(args.task_ids) do
      payloads[i] = {trajectories = {},
        task = out(group(id) and call('HGET', P .. 'group:' .. id, 'task') or '')}
    end
    for i, id in ipairs(args.task_ids) do
      local g = group(id)
      for j, slot in ipairs(g and sorted_slots(g) or {}) do
        payloads[i].trajectories[j] = read(payload_key(slot.payload))
      end
    end
    return {payloads = payloads}
  end,

  Commit = function()
    fence(args.incarnation)
    local batch = find_batch(args.trainer_id, args.batch_id)
    if not batch then
      for _, lane in ipairs(LANES) do
        local last = call('HGET', P .. 'last_commit', lane .. ':' .. args.trainer_id)
        local id, number = string.match(last or '', '^(%S+) (%d+)$')
        if id == args.batch_id then return {count = tonumber(number)} end
      end
      invalid('batch_id = ' .. args.batch_id .. ': not leased by ' .. args.trainer_id)
    end
    if batch.lane == 'train' and args.version <= L.version then
      invalid('version = ' .. args.version .. ': a commit needs one above ' .. L.version)
    end
    tick()
    if batch.lane == 'train' then
      set('version', args.version)
      if L.version > L.published then set('published', L.version) end
      count('tokens_trained', args.tokens_trained)
      count('tokens_masked', args.tokens_masked)
      if args.metrics ~= '' then set('step_metrics', args.metrics) end
    end
    acknowledge(batch)
    for _, id in ipairs(batch.tasks) do
      local g = group(id)
      g.committed_at = L.version
      move(g, 'committed')
      if batch.lane == 'train' then count_lengths('trained', g) end
    end
    call('HDEL', P .. 'batches', batch.name)
    call('HSET', P .. 'last_commit', batch.name, batch.id .. ' ' .. #batch.tasks)
    return {count = #batch.tasks}
  end,

  Release = function()
    fence(args.incarnation)
    tick()
    local batch = find_batch(args.trainer_id, args.batch_id)
    if batch then release(batch) end
    return {}
  end,

  Checkpointed = function()
    fence(args.incarnation)
    tick()
    local freed = 0
    for _, lane in ipairs(LANES) do
      local upto = lane == 'eval' and args.version - 1 or args.version
      local committed = P .. 'committed:' .. lane
      local covered = call('ZRANGEBYSCORE', committed, '-inf', upto, 'LIMIT', 0, args.most - freed)
      for _, id in ipairs(covered) do
        local g = group(id)
        drop_payloads(g)
        forget(g)
      end
      in_parts(covered, function(...) call('ZREM', committed, ...) end)
      freed = freed + #covered
    end
    if freed > 0 then wake.tasks = true end
    return {count = freed}
  end,

  Resume = function()
    local incarnation = args.incarnation
    if incarnation == 0 then incarnation = L.incarnation + 1 end
    if incarnation <= L.incarnation then
      fenced('incarnation = ' .. incarnation .. ': ' .. L.incarnation .. ' has been here already')
    end
    tick()
    set('incarnation', incarnation)
    if args.vocabulary > 0 then set('vocabulary', args.vocabulary) end
    set('version', args.version)
    if L.version > L.published then set('published', L.version) end
    for _, name in ipairs(call('HKEYS', P .. 'batches')) do
      local lane, trainer_id = string.match(name, '^(%a+):(.*)$')
      release(batch_of(lane, trainer_id))
    end
    call('DEL', P .. 'last_commit')
    local restored = 0
    for _, lane in ipairs(LANES) do
      local from = (lane == 'eval' and '' or '(') .. args.version
      for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'committed:' .. lane, from, '+inf')) do
        move(group(id), 'queued')
        restored = restored + 1
      end
    end
    count('restored', restored)
    -- Whatever any earlier life left pending, under whatever name, is claimed and let go.
    local cursor = '0-0'
    repeat
      local claimed = call('XAUTOCLAIM', STREAM, READERS, args.trainer_id, 0, cursor, 'COUNT', 1000,
        'JUSTID')
      cursor = claimed[1]
      if #claimed[2] > 0 then call('XACK', STREAM, READERS, unpack(claimed[2])) end
    until cursor == '0-0'
    return {incarnation = incarnation, restored = restored}
  end,
})
