-- The ledger in Redis: the transitions of ledger/, applied atomically. Each script is this file
-- followed by one of rollout.lua, trainer.lua, operator.lua.
--
-- KEYS[1]  prefix of all keys of the run, with its hash tag: "leeway:{run}:"
-- ARGV     command name, time in ms ("" for the server's clock), arguments as MessagePack (see
--          codec.py), blobs...; a push's: its name, and the sizes of its payloads
-- Reply    {MessagePack of {ok, wake, read} or {error, message}, blobs...}; the values of the keys
--          `read` are further blobs
-- Where bytes belong stands the blob's number, from 0. Payloads never pass through Lua, which would
-- copy them: a push sets their keys in the transaction of its script, which removes those of what
-- it does not accept.
--
-- Keys     meta              hash: layout, settings, budget, clock, version, ... (see `L`)
--          counts, counters  hashes
--          known             set: every task id of the run
--          leases            hash: lease id -> task id
--          task_of           hash: trajectory id -> task id
--          group:<task>      hash: `record` (MessagePack, see `new_group`), `task` (bytes)
--          partials:<task>   hash: index -> bytes
--          payload:<push>:<number>  bytes of an accepted trajectory
--          trajectories      stream of their keys, as fields index -> key; consumer group
--                            `trainers`, a consumer a trainer. An entry is pending while a trainer
--                            holds it, acknowledged by the commit, and deleted by id, with its
--                            payloads, once a checkpoint covers it
--          waiting:<lane>    zset by sequence        running           zset by expiry
--          queued:<lane>     zset by age             committed:<lane>  zset by version
--          dead              zset by sequence        admitted          zset of the running training
--                                                    groups by their node's version at the lease
--          batches           hash: "<lane>:<trainer>" -> the open batch (MessagePack)
--          last_commit       hash: "<lane>:<trainer>" -> "<batch id> <count>"
--          nodes, node_waits hashes: node id -> JSON;  audit: list of JSON, newest first
--
-- What a command changes in meta, counts, counters and groups, and the payloads that it lets go of,
-- is kept here and written once, when it has succeeded: see `reply`.

-- The number of the keys above and of the records in them (`new_group`). Services whose scripts have
-- another must not share a run.
local LAYOUT = 1
local P = KEYS[1]
local args = cmsgpack.unpack(ARGV[3])
local call = redis.call
local STREAM, READERS = P .. 'trajectories', 'trainers'
-- Ages sort by (oldest version, sequence): versions stay below 2^21, sequences below 2^32.
local AGE = 4294967296
local REASONS_KEPT = 20
local NODE_MS = 600000
local AUDIT_KEPT = 1000

local TRANSITIONS = {
  waiting = {running = true, queued = true, filtered = true},
  running = {waiting = true, queued = true, filtered = true, dead = true},
  queued = {leased = true, waiting = true, stale = true},
  leased = {queued = true, committed = true},
  committed = {queued = true},
  filtered = {}, stale = {}, dead = {waiting = true},
}
local STATES = {'waiting', 'running', 'queued', 'leased', 'committed', 'filtered', 'stale', 'dead'}
local LANES = {'train', 'eval'}
-- Whom a move wakes: nodes (tasks or room appeared) or trainers (a group is complete).
local WAKES = {waiting = 'tasks', committed = 'tasks', filtered = 'tasks', stale = 'tasks',
  dead = 'tasks', queued = 'groups'}
local wake = {}

local blobs, reads = {}, {}
local function blob(number) return ARGV[number + 4] end
local function out(bytes)
  blobs[#blobs + 1] = bytes
  return #blobs - 1
end
-- After the last `out`.
local function read(key)
  reads[#reads + 1] = key
  return #blobs + #reads - 1
end

-- Meta and counts --------------------------------------------------------------------------------

local META = {'settings', 'budget', 'clock', 'version', 'published', 'incarnation', 'paused',
  'draining', 'vocabulary', 'bytes', 'untrained_groups', 'untrained_trajectories', 'untrained_scores'}
local L, dirty = {}, {}
for i, value in ipairs(call('HMGET', P .. 'meta', unpack(META))) do
  if i == 1 then L.settings = value else L[META[i]] = tonumber(value or 0) end
end
local S = L.settings and cjson.decode(L.settings) or {}

local function set(name, value)
  L[name], dirty[name] = value, true
end

local function now_ms()
  if ARGV[2] ~= '' then return tonumber(ARGV[2]) end
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local now = math.max(L.clock, now_ms())
local function tick()
  if now > L.clock then set('clock', now) end
end

local function add_bytes(by)
  if by ~= 0 then set('bytes', L.bytes + by) end
end

local counters = {}
local function count(name, by) counters[name] = (counters[name] or 0) + (by or 1) end

local counts, counted = nil, {}
local function counts_of()
  if not counts then
    counts = {}
    local flat = call('HGETALL', P .. 'counts')
    for i = 1, #flat, 2 do counts[flat[i]] = tonumber(flat[i + 1]) end
  end
  return counts
end

local function number_in(lane, state) return counts_of()[lane .. '.' .. state] or 0 end

local function add_count(lane, state, by)
  local name = lane .. '.' .. state
  counts_of()[name] = (counts_of()[name] or 0) + by
  counted[name] = true
end

local function trainable() return number_in('train', 'queued') + number_in('train', 'leased') end
local function outstanding() return number_in('train', 'running') + trainable() end
local function capacity() return (L.budget + 1) * S.batch_groups end

local function audit(actor, what)
  call('LPUSH', P .. 'audit', cjson.encode({at_ms = now, actor = actor, what = what}))
  call('LTRIM', P .. 'audit', 0, AUDIT_KEPT - 1)
end

-- Refusals of a whole command: raised before anything is written.
local function fenced(message) error({kind = 'fenced', message = message}) end
local function invalid(message) error({kind = 'invalid', message = message}) end
local function config(message) error({kind = 'config', message = message}) end
local function fence(incarnation)
  if incarnation ~= L.incarnation then
    fenced('incarnation = ' .. incarnation .. ": the trainer's current life is " .. L.incarnation)
  end
end

-- Groups ----------------------------------------------------------------------------------------

local groups = {}

-- slots: index (as text) -> {stream id, trajectory id, name of the payload}. oldest, newest,
-- mask_below and first_score may be missing.
local function new_group(task)
  local g = {
    lane = task.lane, state = 'waiting', sequence = task.sequence, size = task.size,
    min_version = task.min_version, sampling = task.sampling, external = task.external, lease = '', node = '', expires = 0,
    admitted = 0, progress = 0, progressed_at = 0, attempts = 0, longest = 0, failures = 0, reissues = 0, reasons = {}, slots = {}, samples = 0, tokens = 0,
    bytes = 0, partial_bytes = 0, score_sum = 0, mixed = false, queued_at = 0, committed_at = 0,
  }
  groups[task.task_id] = {id = task.task_id, is = g, changed = true}
  g.id = task.task_id
  return g
end

local function group(id)
  local known = groups[id]
  if not known then
    local record = call('HGET', P .. 'group:' .. id, 'record')
    known = {id = id, is = record and cmsgpack.unpack(record) or nil}
    if known.is then known.is.id = id end
    groups[id] = known
  end
  return known.is
end

local function save(g) groups[g.id].changed = true end

local function forget(g)
  groups[g.id] = {id = g.id, gone = true}
end

local function index_of(g)
  local state = g.state
  if state == 'waiting' then return P .. 'waiting:' .. g.lane, g.sequence end
  if state == 'running' then return P .. 'running', g.expires end
  if state == 'queued' then return P .. 'queued:' .. g.lane, (g.oldest or 0) * AGE + g.sequence end
  if state == 'committed' then return P .. 'committed:' .. g.lane, g.committed_at end
  if state == 'dead' then return P .. 'dead', g.sequence end
end

local function move(g, to)
  if not TRANSITIONS[g.state][to] then
    error('no way from ' .. g.state .. ' to ' .. to .. ' for ' .. g.id)
  end
  local index, score = index_of(g)
  if index then call('ZREM', index, g.id) end
  if g.state == 'running' and g.lane == 'train' then call('ZREM', P .. 'admitted', g.id) end
  add_count(g.lane, g.state, -1)
  add_count(g.lane, to, 1)
  g.state = to
  index, score = index_of(g)
  if index then call('ZADD', index, score, g.id) end
  if to == 'running' and g.lane == 'train' then call('ZADD', P .. 'admitted', g.admitted, g.id) end
  save(g)
  if WAKES[to] then wake[WAKES[to]] = true end
end

local function sorted_slots(g)
  local slots = {}
  for index, slot in pairs(g.slots) do
    slots[#slots + 1] = {index = tonumber(index), payload = slot[3]}
  end
  table.sort(slots, function(a, b) return a.index < b.index end)
  return slots
end

local function payload_key(name) return P .. 'payload:' .. name end

-- Adds the group's entries of the stream to `ids`. Samples that were pushed together share one.
local function add_stream_ids(g, ids)
  local seen = {}
  for _, slot in pairs(g.slots) do
    if not seen[slot[1]] then
      seen[slot[1]] = true
      ids[#ids + 1] = slot[1]
    end
  end
end

-- Ids of the stream, and keys, that the command lets go of.
local dropped_entries, dropped_keys = {}, {}
local function drop_payloads(g)
  local names = {}
  for _, slot in pairs(g.slots) do
    names[#names + 1] = slot[2]
    dropped_keys[#dropped_keys + 1] = payload_key(slot[3])
  end
  if #names > 0 then call('HDEL', P .. 'task_of', unpack(names)) end
  add_stream_ids(g, dropped_entries)
  if g.partial_bytes > 0 then call('DEL', P .. 'partials:' .. g.id) end
  add_bytes(-g.bytes - g.partial_bytes)
  g.slots, g.samples, g.tokens, g.longest, g.bytes, g.partial_bytes = {}, 0, 0, 0, 0, 0
  g.score_sum, g.mixed, g.oldest, g.newest, g.first_score = 0, false, nil, nil, nil
  save(g)
end

local function add_untrained(number, trajectories, scores)
  set('untrained_groups', L.untrained_groups + number)
  set('untrained_trajectories', L.untrained_trajectories + trajectories)
  set('untrained_scores', L.untrained_scores + scores)
end

local function end_untrained(g, to)
  add_untrained(1, g.samples, g.score_sum)
  drop_payloads(g)
  move(g, to)
  forget(g)
end

local function count_lengths(what, g)
  count(what .. '_trajectories', g.samples)
  count(what .. '_tokens', g.tokens)
end

-- The end of a command ----------------------------------------------------------------------------

-- `act` on many: Lua hands a call some thousands of arguments at most.
local function in_parts(items, act)
  for first = 1, #items, 1000 do act(unpack(items, first, math.min(first + 999, #items))) end
end

local function flush()
  for id, known in pairs(groups) do
    if known.gone then
      dropped_keys[#dropped_keys + 1] = P .. 'group:' .. id
    elseif known.changed then
      known.is.id = nil
      call('HSET', P .. 'group:' .. id, 'record', cmsgpack.pack(known.is))
    end
  end
  in_parts(dropped_entries, function(...) call('XDEL', STREAM, ...) end)
  in_parts(dropped_keys, function(...) call('UNLINK', ...) end)
  local fields = {}
  for name in pairs(counted) do
    fields[#fields + 1], fields[#fields + 2] = name, counts[name]
  end
  if #fields > 0 then call('HSET', P .. 'counts', unpack(fields)) end
  for name, by in pairs(counters) do
    if by ~= 0 then call('HINCRBY', P .. 'counters', name, by) end
  end
  fields = {}
  for name in pairs(dirty) do
    fields[#fields + 1], fields[#fields + 2] = name, L[name]
  end
  if #fields > 0 then call('HSET', P .. 'meta', unpack(fields)) end
  for name in pairs(wake) do call('HINCRBY', P .. 'meta', name .. '_epoch', 1) end
end

local function reply(commands)
  local done, result = pcall(commands[ARGV[1]])
  if not done then
    if type(result) ~= 'table' or not result.kind then error(result) end
    return {cmsgpack.pack({error = result.kind, message = result.message})}
  end
  flush()
  table.insert(blobs, 1, cmsgpack.pack({ok = result, wake = wake, read = reads}))
  return blobs
end
