target triple = "$triple"
declare i32 @sem_init(ptr, i32, i32)
declare i32 @sem_post(ptr)
declare i32 @sem_wait(ptr)
declare i32 @sched_yield()
declare i32 @llvm.ctlz.i32(i32, i1)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @time(ptr)
$declare_cpu_pause

; Runs one block: every warp until its first barrier, then every warp that waits, until none waits. Warps that
; have given way run before those at a barrier. -1 after a trap, and where all only give way for too long what
; the last of them returned.
define internal i32 @block(ptr %launch, i64 %number, ptr %scratch) {
entry:
  %context = alloca [$context.bytes x i8], align 64
  %params.from = getelementptr i8, ptr %launch, i64 $launch.params
  %params = load ptr, ptr %params.from
  store ptr %params, ptr %context
  %partial.from = getelementptr i8, ptr %launch, i64 $launch.partial
  %partial = load i32, ptr %partial.from
  %whole = icmp eq i32 %partial, 0
  br i1 %whole, label %prepare, label %partial.barriers
partial.barriers:
  %barriers = getelementptr i8, ptr %context, i64 $context.barriers
  store <$barriers.bytes x i8> zeroinitializer, ptr %barriers, align 64
  br label %prepare
prepare:
  %shared = load ptr, ptr %scratch
  %shared.to = getelementptr i8, ptr %context, i64 $context.shared
  store ptr %shared, ptr %shared.to
  %local.from = getelementptr i8, ptr %scratch, i64 $scratch.local
  %local = load ptr, ptr %local.from
  %local.to = getelementptr i8, ptr %context, i64 $context.local
  store ptr %local, ptr %local.to
  %frames.from = getelementptr i8, ptr %scratch, i64 $scratch.frames
  %frames = load ptr, ptr %frames.from
  %frames.to = getelementptr i8, ptr %context, i64 $context.frames
  store ptr %frames, ptr %frames.to
  %states.from = getelementptr i8, ptr %scratch, i64 $scratch.states
  %states = load ptr, ptr %states.from
  %gx.from = getelementptr i8, ptr %launch, i64 $launch.grid.x
  %gy.from = getelementptr i8, ptr %launch, i64 $launch.grid.y
  %gz.from = getelementptr i8, ptr %launch, i64 $launch.grid.z
  %gx = load i32, ptr %gx.from
  %gy = load i32, ptr %gy.from
  %gz = load i32, ptr %gz.from
  %gx.to = getelementptr i8, ptr %context, i64 $context.nctaid.x
  %gy.to = getelementptr i8, ptr %context, i64 $context.nctaid.y
  %gz.to = getelementptr i8, ptr %context, i64 $context.nctaid.z
  store i32 %gx, ptr %gx.to
  store i32 %gy, ptr %gy.to
  store i32 %gz, ptr %gz.to
  %gx64 = zext i32 %gx to i64
  %gy64 = zext i32 %gy to i64
  %first.row = icmp ult i64 %number, %gx64
  br i1 %first.row, label %place.known, label %divide
divide:                                             ; rare and slow: 64-bit divisions
  %rows = udiv i64 %number, %gx64
  %x.divided = urem i64 %number, %gx64
  %y.divided = urem i64 %rows, %gy64
  %z.divided = udiv i64 %rows, %gy64
  br label %place.known
place.known:
  %x = phi i64 [%number, %prepare], [%x.divided, %divide]
  %y = phi i64 [0, %prepare], [%y.divided, %divide]
  %z = phi i64 [0, %prepare], [%z.divided, %divide]
  %x32 = trunc i64 %x to i32
  %y32 = trunc i64 %y to i32
  %z32 = trunc i64 %z to i32
  %x.to = getelementptr i8, ptr %context, i64 $context.ctaid.x
  %y.to = getelementptr i8, ptr %context, i64 $context.ctaid.y
  %z.to = getelementptr i8, ptr %context, i64 $context.ctaid.z
  store i32 %x32, ptr %x.to
  store i32 %y32, ptr %y.to
  store i32 %z32, ptr %z.to
  %dynamic.from = getelementptr i8, ptr %launch, i64 $launch.dynamic
  %dynamic = load i32, ptr %dynamic.from
  %dynamic.to = getelementptr i8, ptr %context, i64 $context.dynamic
  store i32 %dynamic, ptr %dynamic.to
  %n.from = getelementptr i8, ptr %launch, i64 $launch.n_warps
  %n = load i32, ptr %n.from
  %warp = load ptr, ptr %launch
  br label %start
start:
  %i = phi i32 [0, %place.known], [%i.next, %started]
  %all = phi i32 [0, %place.known], [%all.next, %started]
  %s = call i32 %warp(ptr %context, i32 %i, i32 0)
  %trapped = icmp slt i32 %s, 0
  br i1 %trapped, label %fault, label %started
started:
  %i64 = zext i32 %i to i64
  %place = getelementptr i32, ptr %states, i64 %i64
  store i32 %s, ptr %place
  %all.next = or i32 %all, %s
  %i.next = add i32 %i, 1
  %more = icmp ult i32 %i.next, %n
  br i1 %more, label %start, label %again
again:
  %seen = phi i32 [%all.next, %started], [%any.next, %rest], [%any.next, %patience]
  %since = phi i64 [0, %started], [0, %rest], [%waited, %patience]
  %over = icmp eq i32 %seen, 0
  br i1 %over, label %end, label %choose
choose:                                             ; all that wait go on, or only those that gave way
  %some.spin = and i32 %seen, $gives_way
  %none.spins = icmp eq i32 %some.spin, 0
  %which = select i1 %none.spins, i32 -1, i32 $gives_way
  br label %round
round:
  %w = phi i32 [0, %choose], [%w.next, %stepped]
  %any = phi i32 [0, %choose], [%any.next, %stepped]
  %spinner = phi i32 [0, %choose], [%spinner.next, %stepped]
  %moved = phi i1 [%none.spins, %choose], [%moved.next, %stepped]
  %w64 = zext i32 %w to i64
  %w.place = getelementptr i32, ptr %states, i64 %w64
  %state = load i32, ptr %w.place
  %chosen = and i32 %state, %which
  %runs = icmp ne i32 %chosen, 0
  br i1 %runs, label %resume, label %stepped
resume:
  %from = and i32 %state, $gives_way.number
  %r = call i32 %warp(ptr %context, i32 %w, i32 %from)
  store i32 %r, ptr %w.place
  %r.trapped = icmp slt i32 %r, 0
  br i1 %r.trapped, label %fault, label %stepped
stepped:
  %now = phi i32 [%state, %round], [%r, %resume]
  %any.next = or i32 %any, %now
  %still = and i32 %now, $gives_way
  %spins = icmp ne i32 %still, 0
  %spinner.next = select i1 %spins, i32 %now, i32 %spinner
  %arrived = xor i1 %spins, %runs                    ; it ran, and does not give way
  %moved.next = or i1 %moved, %arrived
  %w.next = add i32 %w, 1
  %w.last = icmp eq i32 %w.next, %n
  br i1 %w.last, label %rest, label %round
rest:
  br i1 %moved.next, label %again, label %patience
patience:
  %ignored = call i32 @sched_yield()
  %time = call i64 @time(ptr null)
  %first = icmp eq i64 %since, 0
  %waited = select i1 %first, i64 %time, i64 %since
  %seconds = sub i64 %time, %waited
  %most.from = getelementptr i8, ptr %launch, i64 $launch.patience
  %most = load i32, ptr %most.from
  %most64 = zext i32 %most to i64
  %tired = icmp ugt i64 %seconds, %most64
  br i1 %tired, label %stuck, label %again
stuck:
  ret i32 %spinner.next
end:
  ret i32 0
fault:
  ret i32 -1
}

; Works on a program until all its launches are done. Blocks are taken in shares: neighbours often read memory
; in a row, which the processor fetches ahead.
define internal void @work(ptr %program, ptr %scratch) {
entry:
  %n = load i64, ptr %program
  %failed = getelementptr i8, ptr %program, i64 $program.failed
  %list.from = getelementptr i8, ptr %program, i64 $program.launches
  %list = load ptr, ptr %list.from
  %none = icmp eq i64 %n, 0
  br i1 %none, label %end, label %launch
launch:
  %i = phi i64 [0, %entry], [%i.next, %finished]
  %place = getelementptr ptr, ptr %list, i64 %i
  %l = load ptr, ptr %place
  %blocks.from = getelementptr i8, ptr %l, i64 $launch.n_blocks
  %blocks = load i64, ptr %blocks.from
  %next = getelementptr i8, ptr %l, i64 $launch.next
  %done = getelementptr i8, ptr %l, i64 $launch.done
  %share.from = getelementptr i8, ptr %l, i64 $launch.share
  %share = load i64, ptr %share.from
  br label %take
take:
  %first = atomicrmw add ptr %next, i64 %share seq_cst
  %some = icmp ult i64 %first, %blocks
  br i1 %some, label %mine, label %wait
mine:
  %beyond = add i64 %first, %share
  %last = icmp ult i64 %blocks, %beyond
  %stop = select i1 %last, i64 %blocks, i64 %beyond
  br label %check
check:
  %b = phi i64 [%first, %mine], [%b.next, %count]
  %bad = load atomic i64, ptr %failed monotonic, align 8
  %skip = icmp ne i64 %bad, 0
  br i1 %skip, label %count, label %go
go:
  %r = call i32 @block(ptr %l, i64 %b, ptr %scratch)
  %fault = icmp ne i32 %r, 0
  br i1 %fault, label %note, label %count
note:
  %why = getelementptr i8, ptr %program, i64 $program.why
  %r64 = sext i32 %r to i64
  store i64 %r64, ptr %why
  %number = add i64 %i, 1
  store atomic i64 %number, ptr %failed monotonic, align 8
  br label %count
count:
  %b.next = add i64 %b, 1
  %goes.on = icmp ult i64 %b.next, %stop
  br i1 %goes.on, label %check, label %counted
counted:
  %mine.done = sub i64 %stop, %first
  %before = atomicrmw add ptr %done, i64 %mine.done seq_cst
  br label %take
wait:
  %spins = phi i64 [0, %take], [%spins.next, %spin]
  %finished.blocks = load atomic i64, ptr %done seq_cst, align 8
  %all = icmp uge i64 %finished.blocks, %blocks
  br i1 %all, label %finished, label %pause
pause:
  $cpu_pause
  %spins.next = add i64 %spins, 1
  %patient = icmp ult i64 %spins.next, 2000
  br i1 %patient, label %spin, label %yield
yield:
  %ignored = call i32 @sched_yield()
  br label %spin
spin:
  br label %wait
finished:
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %launch, label %end
end:
  ret void
}

define void @prepare_pool(ptr %pool) {
  %r = call i32 @sem_init(ptr %pool, i32 0, i32 0)
  ret void
}

; A helper's life: sleep, join the program that is open, if any, and leave it.
define void @help(ptr %pool, ptr %scratch) {
entry:
  %open = getelementptr i8, ptr %pool, i64 $pool.program
  %attached = getelementptr i8, ptr %pool, i64 $pool.attached
  br label %sleep
sleep:
  %ignored = call i32 @sem_wait(ptr %pool)
  %in = atomicrmw add ptr %attached, i32 1 seq_cst
  %program = load atomic ptr, ptr %open seq_cst, align 8
  %none = icmp eq ptr %program, null
  br i1 %none, label %leave, label %join
join:
  call void @work(ptr %program, ptr %scratch)
  br label %leave
leave:
  %out = atomicrmw sub ptr %attached, i32 1 seq_cst
  br label %sleep
}

; Runs a program with `helpers` helpers; returns when all is done and no helper looks at it any more.
define void @run(ptr %pool, ptr %program, ptr %scratch, i32 %helpers) {
entry:
  %open = getelementptr i8, ptr %pool, i64 $pool.program
  %attached = getelementptr i8, ptr %pool, i64 $pool.attached
  %n = load i64, ptr %program
  %list.from = getelementptr i8, ptr %program, i64 $program.launches
  %list = load ptr, ptr %list.from
  %leading = call i32 @llvm.ctlz.i32(i32 %helpers, i1 false)
  %bits = sub i32 36, %leading                      ; at least 16 shares for each worker
  %bits64 = zext i32 %bits to i64
  br label %reset
reset:
  %i = phi i64 [0, %entry], [%i.next, %clear]
  %some = icmp ult i64 %i, %n
  br i1 %some, label %clear, label %publish
clear:
  %place = getelementptr ptr, ptr %list, i64 %i
  %l = load ptr, ptr %place
  %next = getelementptr i8, ptr %l, i64 $launch.next
  %done = getelementptr i8, ptr %l, i64 $launch.done
  store i64 0, ptr %next
  store i64 0, ptr %done
  %blocks.from = getelementptr i8, ptr %l, i64 $launch.n_blocks
  %blocks = load i64, ptr %blocks.from
  %part = lshr i64 %blocks, %bits64
  %share = call i64 @llvm.umax.i64(i64 %part, i64 1)
  %share.to = getelementptr i8, ptr %l, i64 $launch.share
  store i64 %share, ptr %share.to
  %i.next = add i64 %i, 1
  br label %reset
publish:
  %alone = icmp eq i32 %helpers, 0
  br i1 %alone, label %only, label %announce
only:
  call void @work(ptr %program, ptr %scratch)
  ret void
announce:
  store atomic ptr %program, ptr %open seq_cst, align 8
  br label %wake
wake:
  %k = phi i32 [0, %announce], [%k.next, %wake]
  %ignored = call i32 @sem_post(ptr %pool)
  %k.next = add i32 %k, 1
  %again = icmp ult i32 %k.next, %helpers
  br i1 %again, label %wake, label %self
self:
  call void @work(ptr %program, ptr %scratch)
  store atomic ptr null, ptr %open seq_cst, align 8
  br label %quiet
quiet:
  %busy = load atomic i32, ptr %attached seq_cst, align 4
  %still = icmp ne i32 %busy, 0
  br i1 %still, label %yield, label %end
yield:
  %ignored2 = call i32 @sched_yield()
  br label %quiet
end:
  ret void
}
