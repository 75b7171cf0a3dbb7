-- Searches for wrk: every line of the file named after `--` is the body of one POST /v1/search.
-- The last line that it prints is JSON; latencies are microseconds.

local threads = 0

function setup(thread)
  thread:set("number", threads)
  threads = threads + 1
end

function init(args)
  requests = {}
  local headers = { ["Content-Type"] = "application/json" }
  for body in io.lines(args[1]) do
    requests[#requests + 1] = wrk.format("POST", "/v1/search", headers, body)
  end
  -- Each thread begins elsewhere, so that they do not ask the same at the same time.
  at = number * 7919 % #requests
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"requests":%d,"microseconds":%d,"p50":%d,"p99":%d,"status":%d,"connect":%d,"read":%d,"write":%d,"timeout":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect, errors.read, errors.write, errors.timeout))
end
