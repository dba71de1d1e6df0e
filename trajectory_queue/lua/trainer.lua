-- The trainer's side: batches, commits, checkpoints, resumes.

local function batch_of(lane, trainer_id)
  local name = lane .. ':' .. trainer_id
  local key = P .. 'batch:' .. name
  local values = call('HMGET', key, 'id', 'full', 'budget', 'since', 'untrained_groups',
    'untrained_trajectories', 'untrained_scores')
  if not values[1] then return nil end
  return {
    name = name, key = key, lane = lane, trainer_id = trainer_id,
    tasks_key = P .. 'batch_tasks:' .. name, id = values[1], full = values[2] == '1',
    tasks = call('LRANGE', P .. 'batch_tasks:' .. name, 0, -1),
    budget = tonumber(values[3]), since = tonumber(values[4]),
    untrained = {groups = tonumber(values[5] or 0), trajectories = tonumber(values[6] or 0),
      score_sum = tonumber(values[7] or 0)},
  }
end

local function find_batch(trainer_id, batch_id)
  for _, lane in ipairs(LANES) do
    local batch = batch_of(lane, trainer_id)
    if batch and batch.id == batch_id then return batch end
  end
end

local function remove_batch(batch)
  call('DEL', batch.key, batch.tasks_key)
  call('SREM', P .. 'batches', batch.name)
end

-- The dequeue check; a group over the budget is masked, ended or counted.
local function passes(g, budget)
  local limit = L.version - budget
  g.mask_below = nil
  if not g.oldest or g.oldest >= limit then
    save(g, 'mask_below')
    return true
  end
  if S.over_budget == 'keep' then
    count('kept_over_budget')
    save(g, 'mask_below')
    return true
  end
  if S.over_budget == 'mask' and g.newest >= limit then
    count('masked')
    g.mask_below = limit
    save(g, 'mask_below')
    return true
  end
  count_lengths('dropped', g)
  if S.over_budget == 'drop' and g.reissues < S.max_reissues then
    count('reissued')
    g.reissues = g.reissues + 1
    save(g, 'reissues')
    drop_payloads(g)
    move(g, 'waiting')
  else
    end_untrained(g, 'stale')
  end
  return false
end

local function claim(g, batch)
  move(g, 'leased')
  local ids = stream_ids(g)
  if #ids > 0 then
    -- FORCE: makes the entry pending although it was never read by XREADGROUP: age decides, not
    -- the order of arrival.
    local command = {'XCLAIM', STREAM, READERS, batch.trainer_id, 0}
    for _, id in ipairs(ids) do command[#command + 1] = id end
    command[#command + 1] = 'FORCE'
    command[#command + 1] = 'JUSTID'
    call(unpack(command))
  end
  call('RPUSH', batch.tasks_key, g.id)
  batch.tasks[#batch.tasks + 1] = g.id
end

local function acknowledge(g)
  local ids = stream_ids(g)
  if #ids > 0 then call('XACK', STREAM, READERS, unpack(ids)) end
end

local function fill(batch, wanted)
  if #args.task_ids > 0 then
    local ready = {}
    for _, id in ipairs(args.task_ids) do
      local age = call('ZSCORE', P .. 'queued:' .. args.lane, id)
      if age then ready[#ready + 1] = {age = tonumber(age), id = id} end
    end
    table.sort(ready, function(a, b)
      return a.age < b.age or (a.age == b.age and a.id < b.id)
    end)
    for _, entry in ipairs(ready) do
      if #batch.tasks >= wanted then break end
      local g = group(entry.id)
      if args.lane == 'eval' or passes(g, batch.budget) then claim(g, batch) end
    end
    return
  end
  while #batch.tasks < wanted do
    local id = call('ZRANGE', P .. 'queued:' .. args.lane, 0, 0)[1]
    if not id then break end
    local g = group(id)
    if args.lane == 'eval' or passes(g, batch.budget) then claim(g, batch) end
  end
end

local ENDED = {committed = true, dead = true}

local function ended_of(batch)
  local inside, ended = {}, 0
  for _, id in ipairs(batch.tasks) do inside[id] = true end
  for _, id in ipairs(args.task_ids) do
    if not inside[id] then
      local state = call('HGET', P .. 'group:' .. id, 'state')
      if not state or ENDED[state] then ended = ended + 1 end
    end
  end
  return ended
end

local function release(batch)
  add_untrained(batch.untrained.groups, batch.untrained.trajectories, batch.untrained.score_sum)
  for _, id in ipairs(batch.tasks) do
    local g = group(id)
    acknowledge(g)
    move(g, 'queued')
  end
  remove_batch(batch)
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
    local wanted = #args.task_ids > 0 and #args.task_ids or args.groups
    local batch = batch_of(args.lane, args.trainer_id)
    if not batch then
      local name = args.lane .. ':' .. args.trainer_id
      call('HSET', P .. 'batch:' .. name, 'id', args.batch_id, 'budget', L.budget)
      call('SADD', P .. 'batches', name)
      batch = batch_of(args.lane, args.trainer_id)
    end
    call('HSET', batch.key, 'wanted', wanted)
    fill(batch, wanted)
    if not batch.full and #batch.tasks + ended_of(batch) >= wanted then
      batch.full = true
      call('HSET', batch.key, 'full', '1')
      if args.lane == 'train' then
        batch.untrained = {groups = L.untrained_groups, trajectories = L.untrained_trajectories,
          score_sum = L.untrained_scores}
        call('HSET', batch.key, 'untrained_groups', L.untrained_groups,
          'untrained_trajectories', L.untrained_trajectories, 'untrained_scores', L.untrained_scores)
        set('untrained_groups', 0)
        set('untrained_trajectories', 0)
        set('untrained_scores', 0)
      end
    end
    if batch.full then
      call('HDEL', batch.key, 'since')
    elseif not batch.since then
      call('HSET', batch.key, 'since', now)
    end
    local groups = {}
    for i, id in ipairs(batch.tasks) do groups[i] = group_lease(id) end
    batch.untrained.score_sum = string.format('%.17g', batch.untrained.score_sum)
    return {
      batch_id = batch.id, groups = groups, budget = batch.budget, full = batch.full, untrained = batch.untrained,
      running = number_in(args.lane, 'running'), waiting = number_in(args.lane, 'waiting'),
      payload_bytes = L.bytes,
    }
  end,

  Fetch = function()
    local payloads = {}
    for i, id in ipairs(args.task_ids) do
      local trajectories = {}
      for j, slot in ipairs(slots_of({id = id})) do
        trajectories[j] = out(call('XRANGE', STREAM, slot.stream_id, slot.stream_id)[1][2][2])
      end
      payloads[i] = {task = out(call('HGET', P .. 'group:' .. id, 'task') or ''),
        trajectories = trajectories}
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
    end
    for _, id in ipairs(batch.tasks) do
      local g = group(id)
      g.committed_at = L.version
      save(g, 'committed_at')
      acknowledge(g)
      move(g, 'committed')
      if batch.lane == 'train' then count_lengths('trained', g) end
    end
    remove_batch(batch)
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
      for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'committed:' .. lane, '-inf', upto)) do
        drop_payloads(group(id))
        call('ZREM', P .. 'committed:' .. lane, id)
        forget({id = id})
        freed = freed + 1
      end
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
    set('version', args.version)
    if L.version > L.published then set('published', L.version) end
    for _, name in ipairs(call('SMEMBERS', P .. 'batches')) do
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
