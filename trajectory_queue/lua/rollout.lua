-- Producers and rollout nodes: the twin of ledger/rollout.py.

local function see(node_id, version)
  call('HSET', P .. 'nodes', node_id, cjson.encode({version = version, seen = now}))
end

local function end_lease(g)
  if g.lease ~= '' then
    call('HDEL', P .. 'leases', g.lease)
    g.lease = ''
    save(g)
  end
end

-- Why a complete group is not trained; nil when it is.
local function filter(g)
  if g.lane ~= 'train' then return nil end
  if S.filter_longer_than and g.longest > S.filter_longer_than then return 'too_long' end
  if S.filter_equal_scores and g.samples > 1 and not g.mixed then return 'equal_scores' end
end

-- The group has all the samples it will get: the trainer may have it, if it can learn from it.
local function finish(g)
  end_lease(g)
  local reason = filter(g)
  if reason then
    count('filtered_' .. reason)
    end_untrained(g, 'filtered')
    return
  end
  if g.partial_bytes > 0 then call('DEL', P .. 'partials:' .. g.id) end
  add_bytes(-g.partial_bytes)
  g.partial_bytes, g.queued_at = 0, now
  move(g, 'queued')
end

local function fail_attempt(g, failure, message)
  count('failed_' .. failure)
  end_lease(g)
  g.failures = g.failures + 1
  g.reasons[#g.reasons + 1] = failure .. ': ' .. message
  if #g.reasons > REASONS_KEPT then table.remove(g.reasons, 1) end
  if failure ~= 'data' and not g.external and g.failures < S.max_attempts then
    move(g, 'waiting')
  elseif S.min_group and g.samples >= S.min_group then
    count('short_groups')
    finish(g)
  else
    drop_payloads(g)
    move(g, 'dead')
  end
end

local function held(lease_id, node_id)
  local id = call('HGET', P .. 'leases', lease_id)
  local g = id and group(id)
  return g and g.node == node_id and g or nil
end

local function expire()
  local late = call('ZRANGEBYSCORE', P .. 'running', '-inf', now)
  for _, id in ipairs(late) do
    local g = group(id)
    count('expired')
    fail_attempt(g, 'infrastructure', 'node ' .. g.node .. ' fell silent; lease expired')
  end
  return #late
end

local function admission()
  if L.paused == 1 then return 'paused' end
  if L.draining == 1 then return 'draining' end
  if L.bytes >= S.max_bytes and outstanding() >= S.batch_groups then return 'full' end
  return ''
end

local function lease(g, lease_id)
  g.lease, g.node, g.admitted = lease_id, args.node_id, args.version
  g.attempts, g.expires = g.attempts + 1, now + S.lease_ms
  g.progress, g.progressed_at = 0, now
  move(g, 'running')
  call('HSET', P .. 'leases', lease_id, g.id)
  return g
end

local function required_version(g)
  return math.max(g.min_version, L.version + math.floor(outstanding() / S.batch_groups) - L.budget)
end

local function leased(chosen, wait, needed)
  local leases = {}
  for i, g in ipairs(chosen) do
    local done, partials = {}, {}
    for j, slot in ipairs(sorted_slots(g)) do done[j] = slot.index end
    if g.partial_bytes > 0 then
      local indices = call('HKEYS', P .. 'partials:' .. g.id)
      table.sort(indices, function(a, b) return tonumber(a) < tonumber(b) end)
      for j, index in ipairs(indices) do
        partials[j] = out(call('HGET', P .. 'partials:' .. g.id, index))
      end
    end
    leases[i] = {
      lease_id = g.lease, attempt = g.attempts, ttl_ms = g.expires - now,
      task = out(call('HGET', P .. 'group:' .. g.id, 'task')), done = done, partials = partials,
    }
  end
  if #leases > 0 then wait, needed = '', nil elseif wait == '' then wait = 'no_task' end
  local running = number_in('train', 'running') + number_in('eval', 'running')
  return {
    leases = leases, wait = wait, needs_version = needed,
    run_finished = L.draining == 1 and running == 0,
    outstanding = outstanding(), capacity = capacity(), payload_bytes = L.bytes,
  }
end

-- A push's entries, in columns.
local E = args.entries

local function fault(i, g)
  local function refused(field, given, expected)
    return {trajectory_id = E.trajectory_id[i], field = field, given = tostring(given),
      expected = expected}
  end
  local task_id, lease_id = E.task_id[i], E.lease_id[i]
  if not g and call('SISMEMBER', P .. 'known', task_id) == 0 then
    return refused('task_id', task_id, 'not a task of this run; push what was leased')
  end
  local leased_task = not (g and g.lease == lease_id) and call('HGET', P .. 'leases', lease_id)
  if leased_task and leased_task ~= task_id then
    return refused('task_id', task_id, 'the lease is for task ' .. leased_task)
  end
  local newest, largest_id = E.newest[i], E.largest_id[i]
  if newest and newest > L.published then
    return refused('versions', newest, 'the newest published version is ' .. L.published)
  end
  if L.vocabulary > 0 and largest_id >= L.vocabulary then
    return refused('token_ids', largest_id, 'the model knows ' .. L.vocabulary .. ' token ids')
  end
  if not g then return nil end
  if E.index[i] >= g.size then
    return refused('index', E.index[i], 'the group has ' .. g.size .. ' samples')
  end
  if E.sampling[i] ~= g.sampling then
    return refused('sampling', E.sampling[i], 'the task asks for ' .. g.sampling)
  end
end

local function refuse(lease_id, refused)
  count('refused')
  count('refused_' .. refused.field)
  local id = call('HGET', P .. 'leases', lease_id)
  if id then
    fail_attempt(group(id), 'infrastructure',
      'refused: ' .. refused.field .. ' = ' .. refused.given .. ': ' .. refused.expected)
  end
end

local function drop_partial(g, index)
  local size = g.partial_bytes > 0 and call('HSTRLEN', P .. 'partials:' .. g.id, index) or 0
  if size > 0 then
    call('HDEL', P .. 'partials:' .. g.id, index)
    g.partial_bytes = g.partial_bytes - size
    add_bytes(-size)
  end
end

local function payload_name(i) return ARGV[4] .. ':' .. E.payload[i] end
local function payload_size(i) return tonumber(ARGV[5 + E.payload[i]]) end
local function drop_pushed(i)
  dropped_keys[#dropped_keys + 1] = payload_key(payload_name(i))
end

-- Samples of one group that were accepted, to be one entry of the stream.
local function store(g, run)
  local fields, names = {}, {}
  for _, i in ipairs(run) do
    local index = E.index[i]
    fields[#fields + 1], fields[#fields + 2] = index, payload_key(payload_name(i))
    names[#names + 1], names[#names + 2] = E.trajectory_id[i], g.id
  end
  local stream_id = call('XADD', STREAM, '*', unpack(fields))
  call('HSET', P .. 'task_of', unpack(names))
  for _, i in ipairs(run) do g.slots[tostring(E.index[i])][1] = stream_id end
  save(g)
end

local function accept(g, i)
  local index, tokens, score = E.index[i], E.tokens[i], E.score[i]
  local oldest, newest, size = E.oldest[i], E.newest[i], payload_size(i)
  g.slots[tostring(index)] = {'', E.trajectory_id[i], payload_name(i)}
  add_bytes(size)
  drop_partial(g, index)
  count('trajectories')
  count('tokens', tokens)
  if g.samples == 0 then g.first_score = score end
  if score ~= g.first_score then g.mixed = true end
  g.samples, g.tokens, g.bytes = g.samples + 1, g.tokens + tokens, g.bytes + size
  g.longest, g.score_sum = math.max(g.longest, tokens), g.score_sum + score
  if oldest then
    g.oldest = math.min(g.oldest or oldest, oldest)
    g.newest = math.max(g.newest or newest, newest)
  end
end

local function complete(g)
  return g.samples == g.size
    and (g.state == 'running' or g.lane == 'eval' or outstanding() < capacity())
end

local function takes(g, i)
  return g and (g.state == 'waiting' or g.state == 'running')
    and not g.slots[tostring(E.index[i])]
end

-- A new group, which waits; nil when the run knows the task.
local function add(task)
  if call('SADD', P .. 'known', task.task_id) == 0 then return nil end
  local g = new_group(task)
  call('HSET', P .. 'group:' .. task.task_id, 'task', blob(task.payload))
  call('ZADD', P .. 'waiting:' .. task.lane, task.sequence, task.task_id)
  add_count(task.lane, 'waiting', 1)
  return g
end

return reply({
  Enqueue = function()
    if args.incarnation ~= 0 then fence(args.incarnation) end
    tick()
    local accepted = 0
    for _, task in ipairs(args.tasks) do
      if add(task) then
        accepted = accepted + 1
        wake.tasks = true
      end
    end
    return {accepted = accepted, duplicates = #args.tasks - accepted}
  end,

  Open = function()
    tick()
    expire()
    see(args.node_id, args.version)
    local task = args.task
    local lease_id = 'open/' .. task.task_id
    if call('SISMEMBER', P .. 'known', task.task_id) == 1 then
      return leased({held(lease_id, args.node_id)}, 'known')
    end
    local wait = admission()
    if wait == '' and outstanding() >= capacity() then wait = 'budget' end
    local required = required_version(task)
    if wait == '' and args.version < required then return leased({}, 'version', required) end
    if wait ~= '' then return leased({}, wait) end
    return leased({lease(add(task), lease_id)}, '')
  end,

  LeaseTasks = function()
    tick()
    expire()
    see(args.node_id, args.version)
    local chosen = {}
    for n = 0, args.max_groups - 1 do
      local id = call('HGET', P .. 'leases', args.request_id .. '/' .. n)
      if id then chosen[#chosen + 1] = group(id) end
    end
    if #chosen > 0 then return leased(chosen, '') end
    local wait, needed = admission(), nil
    if wait ~= '' then return leased({}, wait) end
    local function take(g)
      chosen[#chosen + 1] = lease(g, args.request_id .. '/' .. #chosen)
    end
    while #chosen < args.max_groups do
      local id = call('ZRANGE', P .. 'waiting:eval', 0, 0)[1]
      local g = id and group(id)
      if not g then break end
      if args.version < g.min_version then
        needed = g.min_version
        break
      end
      take(g)
    end
    while #chosen < args.max_groups do
      local id = call('ZRANGE', P .. 'waiting:train', 0, 0)[1]
      if not id then break end
      local g = group(id)
      local required = required_version(g)
      if outstanding() >= capacity() then
        wait = 'budget'
        break
      elseif g.samples == g.size then
        finish(g)
      elseif args.version < required then
        needed = math.min(needed or required, required)
        break
      else
        take(g)
      end
    end
    return leased(chosen, needed and 'version' or wait, needed)
  end,

  Extend = function()
    tick()
    see(args.node_id, args.version)
    call('HSET', P .. 'node_waits', args.node_id,
      cjson.encode({waiting_for = args.waiting_for, waiting_ms = args.waiting_ms,
        load_percent = args.load_percent}))
    local lost = {}
    for _, progress in ipairs(args.progress) do
      local g = held(progress.lease_id, args.node_id)
      if g and progress.tokens ~= g.progress then
        g.progress, g.progressed_at = progress.tokens, now
      end
      if not g then
        lost[#lost + 1] = progress.lease_id
      elseif now - g.progressed_at >= S.stall_ms then
        lost[#lost + 1] = progress.lease_id
        count('stalled')
        fail_attempt(g, 'infrastructure', 'stalled at ' .. g.progress .. ' tokens')
      else
        g.expires = now + S.lease_ms
        save(g)
        call('ZADD', P .. 'running', g.expires, g.id)
      end
    end
    return {lost = lost}
  end,

  Push = function()
    local number = #(E.task_id or {})
    local function nothing(result)
      for i = 1, number do drop_pushed(i) end
      return result
    end
    local size = 0
    for i = 1, number do size = size + payload_size(i) end
    if L.bytes + size > S.max_bytes and trainable() >= S.batch_groups then
      return nothing({full = true})
    end
    for i = 1, args.patient and number or 0 do
      if (E.newest[i] or 0) > L.published then return nothing({ahead = true}) end
    end
    tick()
    local accepted, duplicates, refusals = {}, {}, {}
    local run = {}
    for i = 1, number do
      local task_id = E.task_id[i]
      local g = group(task_id)
      local wrong = fault(i, g)
      local taken = not wrong and takes(g, i)
      if taken then
        accepted[#accepted + 1] = E.trajectory_id[i]
        accept(g, i)
        run[#run + 1] = i
      else
        drop_pushed(i)
      end
      -- A run of one group's samples is stored together, before anything else happens to it.
      if #run > 0 and (not taken or E.task_id[i + 1] ~= task_id or complete(g)) then
        store(group(E.task_id[run[1]]), run)
        run = {}
      end
      if taken and complete(g) then finish(g) end
      if wrong then
        refusals[#refusals + 1] = wrong
        refuse(E.lease_id[i], wrong)
      elseif not taken then
        duplicates[#duplicates + 1] = E.trajectory_id[i]
        count('duplicates')
      end
    end
    for _, door in ipairs(args.at_the_door) do
      refusals[#refusals + 1] = door.refused
      refuse(door.lease_id, door.refused)
    end
    return {accepted = accepted, duplicates = duplicates, refused = refusals}
  end,

  GiveBack = function()
    local g = held(args.lease_id, args.node_id)
    if not g then return {} end
    tick()
    if g.external then
      fail_attempt(g, 'infrastructure', 'its producer gave it back')
      return {}
    end
    count('given_back')
    for _, partial in ipairs(args.partials) do
      if partial.index < g.size and not g.slots[tostring(partial.index)] then
        drop_partial(g, partial.index)
        local payload = blob(partial.payload)
        call('HSET', P .. 'partials:' .. g.id, partial.index, payload)
        g.partial_bytes = g.partial_bytes + #payload
        add_bytes(#payload)
      end
    end
    end_lease(g)
    move(g, 'waiting')
    return {}
  end,

  Fail = function()
    local g = held(args.lease_id, args.node_id)
    if g then
      tick()
      fail_attempt(g, args.failure, args.message)
    end
    return {}
  end,

  Expire = function()
    tick()
    local nodes = call('HGETALL', P .. 'nodes')
    for i = 1, #nodes, 2 do
      if cjson.decode(nodes[i + 1]).seen < now - NODE_MS then
        call('HDEL', P .. 'nodes', nodes[i])
        call('HDEL', P .. 'node_waits', nodes[i])
      end
    end
    return {count = expire()}
  end,
})
