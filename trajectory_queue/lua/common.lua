-- The ledger in Redis: the transitions of ledger.py, applied atomically. Each script is this file
-- followed by one of rollout.lua, trainer.lua, operator.lua.
--
-- KEYS[1]  prefix of all keys of the run, with its hash tag: "leeway:{run}:"
-- ARGV     command name, time in ms ("" for the server's clock), arguments as JSON, blobs...
-- Bytes are passed as blobs; in JSON stands the blob's number, from 0.
-- Reply    {JSON of {ok, wake} or {error, message}, blobs...}
--
-- Keys     meta              hash: settings, budget, clock, version, ... (see `L`)
--          counts, counters  hashes
--          known             set: every task id of the run
--          leases            hash: lease id -> task id
--          task_of           hash: trajectory id -> task id
--          group:<task>      hash: see `FIELDS`, and `task` (bytes), `reasons` (JSON)
--          slots:<task>      hash: index -> "<stream id> <trajectory id>"
--          partials:<task>   hash: index -> bytes
--          trajectories      stream of payloads; consumer group `trainers`, a consumer a trainer.
--                            An entry is pending while a trainer holds it, acknowledged by the
--                            commit, and deleted by id once a checkpoint covers it
--          waiting:<lane>    zset by sequence        running           zset by expiry
--          queued:<lane>     zset by age             committed:<lane>  zset by version
--          dead              zset by sequence
--          batches           set of "<lane>:<trainer>"; batch:<...> hash; batch_tasks:<...> list
--          last_commit       hash "<lane>:<trainer>" -> "<batch id> <count>"
--          nodes, node_waits hashes: node id -> JSON;  audit: list of JSON
local P = KEYS[1]
local args = cjson.decode(ARGV[3])
local call = redis.call
local STREAM, READERS = P .. 'trajectories', 'trainers'
-- Ages sort by (oldest version, sequence): versions stay below 2^21, sequences below 2^32.
local AGE = 4294967296
local REASONS_KEPT = 20
local NODE_MS = 600000

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

local blobs = {}
local function blob(number) return ARGV[number + 4] end
local function out(bytes)
  blobs[#blobs + 1] = bytes
  return #blobs - 1
end

-- Meta ------------------------------------------------------------------------------------------

local META = {'settings', 'budget', 'clock', 'version', 'published', 'incarnation', 'paused',
  'draining', 'bytes', 'untrained_groups', 'untrained_trajectories', 'untrained_scores'}
local L = {}
for i, value in ipairs(call('HMGET', P .. 'meta', unpack(META))) do
  if i == 1 then L.settings = value else L[META[i]] = tonumber(value or 0) end
end
local S = L.settings and cjson.decode(L.settings) or {}

local function set(name, value)
  L[name] = value
  call('HSET', P .. 'meta', name, value)
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

local function count(name, by)
  if by ~= 0 then call('HINCRBY', P .. 'counters', name, by or 1) end
end

local function add_bytes(by)
  if by ~= 0 then L.bytes = call('HINCRBY', P .. 'meta', 'bytes', by) end
end

local function number_in(lane, state)
  return tonumber(call('HGET', P .. 'counts', lane .. '.' .. state) or 0)
end

local function trainable() return number_in('train', 'queued') + number_in('train', 'leased') end
local function outstanding() return number_in('train', 'running') + trainable() end
local function capacity() return (L.budget + 1) * S.batch_groups end

local function audit(actor, what)
  call('RPUSH', P .. 'audit', cjson.encode({at = now, actor = actor, what = what}))
  call('LTRIM', P .. 'audit', -1000, -1)
end

-- Refusals of a whole command: raised before anything is written.
local function fenced(message) error({kind = 'fenced', message = message}) end
local function invalid(message) error({kind = 'invalid', message = message}) end
local function fence(incarnation)
  if incarnation ~= L.incarnation then
    fenced('incarnation = ' .. incarnation .. ": the trainer's current life is " .. L.incarnation)
  end
end

-- Groups ----------------------------------------------------------------------------------------

local TEXT = {state = true, lane = true, sampling = true, lease = true, node = true}
local FIELDS = {'state', 'lane', 'sampling', 'lease', 'node', 'sequence', 'size', 'min_version', 'expires',
  'attempts', 'failures', 'reissues', 'samples', 'oldest', 'newest', 'tokens', 'bytes',
  'partial_bytes', 'score_sum', 'first_score', 'mixed', 'queued_at', 'mask_below', 'committed_at'}

-- Numbers that are not set read as 0, except these, which read as nil.
local OPTIONAL = {oldest = true, newest = true, mask_below = true, first_score = true}

local function group(id)
  local values = call('HMGET', P .. 'group:' .. id, unpack(FIELDS))
  if not values[1] then return nil end
  local g = {id = id}
  for i, name in ipairs(FIELDS) do
    local value = values[i]
    if TEXT[name] then
      g[name] = value or ''
    elseif value and value ~= '' then
      g[name] = tonumber(value)
    elseif not OPTIONAL[name] then
      g[name] = 0
    end
  end
  return g
end

local function save(g, ...)
  local fields = {}
  for _, name in ipairs({...}) do
    fields[#fields + 1] = name
    fields[#fields + 1] = g[name] == nil and '' or g[name]
  end
  call('HSET', P .. 'group:' .. g.id, unpack(fields))
end

local function index_of(g)
  if g.state == 'waiting' then return P .. 'waiting:' .. g.lane, g.sequence end
  if g.state == 'running' then return P .. 'running', g.expires end
  if g.state == 'queued' then return P .. 'queued:' .. g.lane, (g.oldest or 0) * AGE + g.sequence end
  if g.state == 'committed' then return P .. 'committed:' .. g.lane, g.committed_at end
  if g.state == 'dead' then return P .. 'dead', g.sequence end
end

local function move(g, to)
  if not TRANSITIONS[g.state][to] then
    error('no way from ' .. g.state .. ' to ' .. to .. ' for ' .. g.id)
  end
  local index, score = index_of(g)
  if index then call('ZREM', index, g.id) end
  call('HINCRBY', P .. 'counts', g.lane .. '.' .. g.state, -1)
  call('HINCRBY', P .. 'counts', g.lane .. '.' .. to, 1)
  g.state = to
  index, score = index_of(g)
  if index then call('ZADD', index, score, g.id) end
  save(g, 'state')
  if WAKES[to] then wake[WAKES[to]] = true end
end

-- Stream ids and trajectory ids of a group's samples, in order of their index.
local function slots_of(g)
  local flat = call('HGETALL', P .. 'slots:' .. g.id)
  local slots = {}
  for i = 1, #flat, 2 do
    local stream_id, trajectory_id = string.match(flat[i + 1], '^(%S+) (.*)$')
    slots[#slots + 1] = {index = tonumber(flat[i]), stream_id = stream_id, id = trajectory_id}
  end
  table.sort(slots, function(a, b) return a.index < b.index end)
  return slots
end

local function stream_ids(g)
  local ids = {}
  for i, slot in ipairs(slots_of(g)) do ids[i] = slot.stream_id end
  return ids
end

local function drop_payloads(g)
  for _, slot in ipairs(slots_of(g)) do
    call('XDEL', STREAM, slot.stream_id)
    call('HDEL', P .. 'task_of', slot.id)
  end
  call('DEL', P .. 'slots:' .. g.id, P .. 'partials:' .. g.id)
  add_bytes(-g.bytes - g.partial_bytes)
  g.samples, g.tokens, g.bytes, g.partial_bytes, g.score_sum, g.mixed = 0, 0, 0, 0, 0, 0
  g.oldest, g.newest, g.first_score = nil, nil, nil
  save(g, 'samples', 'tokens', 'bytes', 'partial_bytes', 'score_sum', 'mixed', 'oldest', 'newest',
    'first_score')
end

local function add_untrained(groups, trajectories, scores)
  set('untrained_groups', L.untrained_groups + groups)
  set('untrained_trajectories', L.untrained_trajectories + trajectories)
  set('untrained_scores', L.untrained_scores + scores)
end

local function forget(g) call('DEL', P .. 'group:' .. g.id) end

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

local function reply(commands)
  local done, result = pcall(commands[ARGV[1]])
  if not done then
    if type(result) ~= 'table' or not result.kind then error(result) end
    return {cjson.encode({error = result.kind, message = result.message})}
  end
  for name in pairs(wake) do call('HINCRBY', P .. 'meta', name .. '_epoch', 1) end
  table.insert(blobs, 1, cjson.encode({ok = result, wake = wake}))
  return blobs
end
